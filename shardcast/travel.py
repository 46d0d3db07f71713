"""Which way a version travels, and how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Way(StrEnum):
    """How the bytes of a version come."""

    FULL = "full"  # its files, shard by shard
    PACKED = "packed"  # its files without what is redundant in them
    DELTA = "delta"  # what changed since a version that is here
    MIXED = "mixed"  # by a blob that made some shards, and the others in full


@dataclass(frozen=True, slots=True)
class Progress:
    """In bytes; `done` counts received bytes, and only verified ones after a restart.

    `total` is what travels: all files, or a blob alone. It changes with `way` when a blob turns out to be no use.
    """

    done: int
    total: int
    way: Way = Way.FULL


OnProgress = Callable[[Progress], None]
