"""Bytes that travel beside a version's files and make them: what a manifest says of a delta or of a packed version.

A blob travels as shards of its own, is named by the digest over their digests (`tree_digest`), and proves nothing by
itself: what is made of it is held against the version's own digests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from protocol.digest import Digest, InvalidManifest, tree_digest

MAX_BLOB_SHARDS = 65_536
MAX_BLOB_SHARD_BYTES = 256 * 2**20
_CODEC = re.compile(r"[a-z0-9][a-z0-9.-]{0,31}")


@dataclass(frozen=True, slots=True)
class BlobShard:
    """Bytes [offset, offset + size) of the blob, and their SHA-256."""

    offset: int
    size: int
    digest: Digest


class BlobSection(Protocol):
    """What every section of a manifest that names a blob says of it."""

    @property
    def codec(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def digest(self) -> Digest: ...

    @property
    def shards(self) -> tuple[BlobShard, ...]: ...


def check_blob(section: BlobSection, what: str) -> None:
    """`shards` tile the blob in order, and `digest` follows from theirs. Raises InvalidManifest."""
    if not _CODEC.fullmatch(section.codec):
        raise InvalidManifest(f"the codec of the {what} has 1 to 32 of a-z 0-9 . -, it is {section.codec!r:.40}")
    if not 1 <= len(section.shards) <= MAX_BLOB_SHARDS:
        raise InvalidManifest(f"the {what} has 1 to {MAX_BLOB_SHARDS} shards, not {len(section.shards)}")
    offset = 0
    for index, shard in enumerate(section.shards):
        check_range(shard.size, 1, MAX_BLOB_SHARD_BYTES, f"size of shard {index} of the {what}")
        if shard.offset != offset:
            raise InvalidManifest(f"shard {index} of the {what} does not continue at byte {offset}")
        offset += shard.size
    if offset != section.size:
        raise InvalidManifest(f"the shards of the {what} have {offset} bytes, not {section.size!r:.40}")
    if tree_digest(shard.digest for shard in section.shards) != section.digest:
        raise InvalidManifest(f"the digest of the {what} does not follow from its shards")


def shards_to_json(shards: Sequence[BlobShard]) -> list[list[Any]]:
    """As a manifest's JSON has them."""
    return [[shard.offset, shard.size, shard.digest] for shard in shards]


def shards_from_json(items: Any, what: str) -> tuple[BlobShard, ...]:
    """Read parsed JSON that may come from anyone. Raises InvalidManifest."""
    if not isinstance(items, list) or len(items) > MAX_BLOB_SHARDS:
        raise InvalidManifest(f"the shards of the {what} are a list of at most {MAX_BLOB_SHARDS}")
    return tuple(_shard_from(item, what) for item in items)


def text(value: Any, name: str) -> str:
    """A string of parsed JSON. Raises InvalidManifest for anything else."""
    if not isinstance(value, str):
        raise InvalidManifest(f"{name} should be str, not {type(value).__name__}")
    return value


def whole(value: Any, name: str) -> int:
    """A whole number of parsed JSON. Raises InvalidManifest for anything else."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidManifest(f"{name} should be int, not {type(value).__name__}")
    return value


def check_range(value: int, low: int, high: int, name: str) -> None:
    """Raises InvalidManifest unless it is a whole number within both, included."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidManifest(f"{name} should be within {low} and {high}, it is {value!r:.40}")


def _shard_from(item: Any, what: str) -> BlobShard:
    if not isinstance(item, list) or len(item) != 3:
        raise InvalidManifest(f"a shard of the {what} reads [offset, size, digest]")
    offset, size = (whole(value, f"shards[] of the {what}") for value in item[:2])
    return BlobShard(offset, size, Digest(item[2]))
