"""Which way a version comes: its files in full or packed, or the deltas that lead to it from a version that is here.

A pure decision: `choose` says what to do, or which manifest must be known before it can say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from protocol.delta import CODEC_WORDS
from protocol.digest import Digest
from protocol.manifest import Manifest
from protocol.packed import CODEC_PLANES

MAX_LINKS = 16  # deltas in a row: each costs reading the model once


class WhyFull(StrEnum):
    """Why the files are fetched although nothing failed."""

    KEYFRAME = "keyframe"  # the version, or one on the way to it, has no delta
    CODEC = "codec"  # a delta in a codec of a later program
    NO_BASE = "no_base"  # no version that is here leads to it
    TOO_MUCH = "too_much"  # the deltas together are no less than what they would save, or are too many
    UNKNOWN = "unknown"  # a manifest on the way can't be had


@dataclass(frozen=True, slots=True)
class Full:
    """Fetch the files."""

    why: WhyFull


@dataclass(frozen=True, slots=True)
class Packed:
    """Fetch the version packed: `size` bytes of that are missing."""

    size: int


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
    target: Manifest,
    missing: int,
    held: Mapping[int, Digest],
    known: Mapping[Digest, Manifest | None],
    packed: int | None = None,
) -> Full | Packed | Chain | Ask:
    """How to get `target`, of whose files `missing` bytes are not here yet: the way with the fewest bytes.

    `held`: the complete versions here and their manifests' digests. `known`: manifests by digest; None for one that
    can't be had. Every manifest is proven: signed by a pinned key, or named by the digest in one that is. `packed`: how
    many bytes of the version's packed form are missing; None if it has none, or that has failed.
    """
    if target.packed is None or target.packed.codec != CODEC_PLANES:
        packed = None
    most = missing if packed is None else min(missing, packed)
    found = _by_deltas(target, most, held, known)
    if isinstance(found, Full) and packed is not None and packed < missing:
        return Packed(packed)
    return found


def _by_deltas(
    target: Manifest, most: int, held: Mapping[int, Digest], known: Mapping[Digest, Manifest | None]
) -> Full | Chain | Ask:
    """The chain that leads to `target`, if it is less than `most` bytes."""
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
        if size >= most or len(links) > MAX_LINKS:
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
