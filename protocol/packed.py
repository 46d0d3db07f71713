"""The part of a manifest that names its files packed: one blob that makes all of them and needs nothing else.

Half of a bfloat16 weight is its exponent, which takes few values: a whole version weighs a third less when those are
coded. Who doesn't know the codec, or gets a blob that is of no use, fetches the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protocol.blob import BlobShard, check_blob, shards_from_json, shards_to_json, text, whole
from protocol.digest import Digest, InvalidManifest

# shardcast.delta reads and writes this one; others are left alone, not refused.
CODEC_PLANES = "planes-1"

_WHAT = "packed version"
_FIELDS = frozenset({"codec", "size", "digest", "shards"})


@dataclass(frozen=True, slots=True)
class PackedSection:
    """A blob of `size` bytes, in `codec`. `shards` tile it in order; `digest` is over theirs (`tree_digest`).

    Construction checks every rule and raises InvalidManifest.
    """

    codec: str
    size: int
    digest: Digest
    shards: tuple[BlobShard, ...]

    def __post_init__(self) -> None:
        check_blob(self, _WHAT)


def packed_to_json(packed: PackedSection) -> dict[str, Any]:
    """The section as the manifest's JSON has it."""
    shards = shards_to_json(packed.shards)
    return {"codec": packed.codec, "size": packed.size, "digest": packed.digest, "shards": shards}


def packed_from_json(body: Any) -> PackedSection:
    """Read the section from parsed JSON that may come from anyone. Raises InvalidManifest."""
    if not isinstance(body, Mapping) or body.keys() != _FIELDS:
        raise InvalidManifest(f"a packed version has exactly the fields {', '.join(sorted(_FIELDS))}")
    return PackedSection(
        codec=text(body["codec"], "codec of the packed version"),
        size=whole(body["size"], "size of the packed version"),
        digest=Digest(body["digest"]),
        shards=shards_from_json(body["shards"], _WHAT),
    )
