"""Which way a version travels, and how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Way(StrEnum):
    """How the bytes of a version come."""

    FULL = "full"  # its files, shard by shard
    DELTA = "delta"  # what changed since a version that is here
    MIXED = "mixed"  # by a delta that made some shards, and the others in full


@dataclass(frozen=True, slots=True)
class Progress:
    """In bytes; `done` counts received bytes, and only verified ones after a restart.

    `total` is what travels: all files, or the delta alone. It changes with `way` when a delta turns out to be no use.
    """

    done: int
    total: int
    way: Way = Way.FULL


OnProgress = Callable[[Progress], None]
