"""The part of a manifest that says how to make this version out of an earlier one.

A version's manifest always lists its files in full. With a `DeltaSection` it also names a blob that turns the base's
files into this version's; the blob travels as shards of its own. Who can't use it (no base, a codec it doesn't know)
fetches the files: which way the bytes came changes nothing about the version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.digest import Digest, InvalidManifest, tree_digest

# shardcast.delta reads and writes this one; others are left alone, not refused.
CODEC_WORDS = "words-1"

MAX_DELTA_SHARDS = 65_536
MAX_DELTA_SHARD_BYTES = 256 * 2**20
_MAX_VERSION = 2**53 - 1
_CODEC = re.compile(r"[a-z0-9][a-z0-9.-]{0,31}")
_FIELDS = frozenset({"codec", "base_version", "base_digest", "size", "digest", "shards"})


@dataclass(frozen=True, slots=True)
class DeltaShard:
    """Bytes [offset, offset + size) of the blob, and their SHA-256."""

    offset: int
    size: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class DeltaSection:
    """A blob of `size` bytes, in `codec`, against the version whose manifest has `base_digest`.

    `shards` tile the blob in order; `digest` is over their digests (`tree_digest`). Construction checks every rule and
    raises InvalidManifest.
    """

    codec: str
    base_version: int
    base_digest: Digest
    size: int
    digest: Digest
    shards: tuple[DeltaShard, ...]

    def __post_init__(self) -> None:
        if not _CODEC.fullmatch(self.codec):
            raise InvalidManifest(f"a delta's codec has 1 to 32 of a-z 0-9 . -, not {self.codec!r:.40}")
        _check_range(self.base_version, 0, _MAX_VERSION, "base_version")
        if not 1 <= len(self.shards) <= MAX_DELTA_SHARDS:
            raise InvalidManifest(f"a delta has 1 to {MAX_DELTA_SHARDS} shards, this one {len(self.shards)}")
        offset = 0
        for index, shard in enumerate(self.shards):
            _check_range(shard.size, 1, MAX_DELTA_SHARD_BYTES, f"size of delta shard {index}")
            if shard.offset != offset:
                raise InvalidManifest(f"delta shard {index} does not continue at byte {offset}")
            offset += shard.size
        if offset != self.size:
            raise InvalidManifest(f"the delta's shards have {offset} bytes, not {self.size!r:.40}")
        if tree_digest(shard.digest for shard in self.shards) != self.digest:
            raise InvalidManifest("the delta's digest does not follow from its shards")


def delta_to_json(delta: DeltaSection) -> dict[str, Any]:
    """The section as the manifest's JSON has it."""
    return {
        "codec": delta.codec,
        "base_version": delta.base_version,
        "base_digest": delta.base_digest,
        "size": delta.size,
        "digest": delta.digest,
        "shards": [[shard.offset, shard.size, shard.digest] for shard in delta.shards],
    }


def delta_from_json(body: Any) -> DeltaSection:
    """Read the section from parsed JSON that may come from anyone. Raises InvalidManifest."""
    if not isinstance(body, Mapping) or body.keys() != _FIELDS:
        raise InvalidManifest(f"a delta has exactly the fields {', '.join(sorted(_FIELDS))}")
    if not isinstance(body["codec"], str) or not isinstance(body["shards"], list):
        raise InvalidManifest("a delta's codec is a string and its shards are a list")
    if len(body["shards"]) > MAX_DELTA_SHARDS:
        raise InvalidManifest(f"a delta has at most {MAX_DELTA_SHARDS} shards, this one {len(body['shards'])}")
    return DeltaSection(
        codec=body["codec"],
        base_version=_whole(body["base_version"], "base_version"),
        base_digest=Digest(body["base_digest"]),
        size=_whole(body["size"], "size of the delta"),
        digest=Digest(body["digest"]),
        shards=tuple(map(_shard_from, body["shards"])),
    )


def _shard_from(item: Any) -> DeltaShard:
    if not isinstance(item, Sequence) or isinstance(item, str) or len(item) != 3:
        raise InvalidManifest("a delta's shard reads [offset, size, digest]")
    offset, size = (_whole(value, "delta.shards[]") for value in item[:2])
    return DeltaShard(offset, size, Digest(item[2]))


def _whole(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidManifest(f"{name} should be int, not {type(value).__name__}")
    return value


def _check_range(value: int, low: int, high: int, name: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidManifest(f"{name} should be within {low} and {high}, it is {value!r:.40}")
