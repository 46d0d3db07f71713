"""The part of a manifest that says how to make this version out of an earlier one.

A version's manifest always lists its files in full. With a `DeltaSection` it also names a blob that turns the base's
files into this version's; the blob travels as shards of its own. Who can't use it (no base, a codec it doesn't know)
fetches the files: which way the bytes came changes nothing about the version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protocol.blob import BlobShard, check_blob, check_range, shards_from_json, shards_to_json, text, whole
from protocol.digest import Digest, InvalidManifest

# shardcast.delta reads and writes this one; others are left alone, not refused.
CODEC_WORDS = "words-1"

_MAX_VERSION = 2**53 - 1
_WHAT = "delta"
_FIELDS = frozenset({"codec", "base_version", "base_digest", "size", "digest", "shards"})


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
    shards: tuple[BlobShard, ...]

    def __post_init__(self) -> None:
        check_range(self.base_version, 0, _MAX_VERSION, "base_version")
        check_blob(self, _WHAT)


def delta_to_json(delta: DeltaSection) -> dict[str, Any]:
    """The section as the manifest's JSON has it."""
    return {
        "codec": delta.codec,
        "base_version": delta.base_version,
        "base_digest": delta.base_digest,
        "size": delta.size,
        "digest": delta.digest,
        "shards": shards_to_json(delta.shards),
    }


def delta_from_json(body: Any) -> DeltaSection:
    """Read the section from parsed JSON that may come from anyone. Raises InvalidManifest."""
    if not isinstance(body, Mapping) or body.keys() != _FIELDS:
        raise InvalidManifest(f"a delta has exactly the fields {', '.join(sorted(_FIELDS))}")
    return DeltaSection(
        codec=text(body["codec"], "codec of the delta"),
        base_version=whole(body["base_version"], "base_version"),
        base_digest=Digest(body["base_digest"]),
        size=whole(body["size"], "size of the delta"),
        digest=Digest(body["digest"]),
        shards=shards_from_json(body["shards"], _WHAT),
    )
