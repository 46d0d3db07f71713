"""Which way a version comes: its files in full, or the deltas that lead to it from a version that is here.

A pure decision: `choose` says what to do, or which manifest must be known before it can say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from protocol.delta import CODEC_WORDS
from protocol.digest import Digest
from protocol.manifest import Manifest, ManifestFile, Shard

BLOB_FILE = "delta"  # its name while it is received
MAX_LINKS = 16  # deltas in a row: each costs reading the model once


class WhyFull(StrEnum):
    """Why the files are fetched although nothing failed."""

    KEYFRAME = "keyframe"  # the version, or one on the way to it, has no delta
    CODEC = "codec"  # a delta in a codec of a later program
    NO_BASE = "no_base"  # no version that is here leads to it
    TOO_MUCH = "too_much"  # the deltas together are no less than what is missing, or are too many
    UNKNOWN = "unknown"  # a manifest on the way can't be had


@dataclass(frozen=True, slots=True)
class Full:
    """Fetch the files."""

    why: WhyFull


@dataclass(frozen=True, slots=True)
class Chain:
    """Apply the deltas of `links` in order, the first one to the version `base`. Together they have `size` bytes."""

    base: int
    links: tuple[Manifest, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Ask:
    """The manifest of this version, with this digest, must be known first."""

    version: int
    digest: Digest


def choose(
    target: Manifest, missing: int, held: Mapping[int, Digest], known: Mapping[Digest, Manifest | None]
) -> Full | Chain | Ask:
    """How to get `target`, of whose files `missing` bytes are not here yet.

    `held`: the complete versions here and their manifests' digests. `known`: manifests by digest; None for one that
    can't be had. Every manifest is proven: signed by a pinned key, or named by the digest in one that is.
    """
    links: list[Manifest] = []
    size = 0
    manifest = target
    while True:
        delta = manifest.delta
        if delta is None:
            return Full(WhyFull.KEYFRAME)
        if delta.codec != CODEC_WORDS:
            return Full(WhyFull.CODEC)
        links.insert(0, manifest)
        size += delta.size
        if size >= missing or len(links) > MAX_LINKS:
            return Full(WhyFull.TOO_MUCH)
        if held.get(delta.base_version) == delta.base_digest:
            return Chain(delta.base_version, tuple(links), size)
        if not any(version < delta.base_version for version in held):
            return Full(WhyFull.NO_BASE)
        if delta.base_digest not in known:
            return Ask(delta.base_version, delta.base_digest)
        base = known[delta.base_digest]
        if base is None or base.policy_version != delta.base_version:
            return Full(WhyFull.UNKNOWN)
        manifest = base


def blob_manifest(version: Manifest) -> Manifest:
    """A version's delta as if it were a version of one file, so that it is received and resumed like one.

    It is never signed and never leaves this process; the signed manifest vouches for its digests.
    """
    delta = version.delta
    assert delta is not None
    return Manifest(
        run_id=version.run_id,
        policy_version=version.policy_version,
        files=(ManifestFile(BLOB_FILE, delta.size, delta.digest),),
        shards=tuple(Shard(0, shard.offset, shard.size, shard.digest) for shard in delta.shards),
        total_digest=delta.digest,
    )
