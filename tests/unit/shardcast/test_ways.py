"""shardcast.ways: what is fetched, decided from what is here and what is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.blob import BlobShard
from protocol.delta import CODEC_WORDS, DeltaSection
from protocol.manifest import Digest, Manifest, ManifestFile, Shard, manifest_digest, tree_digest
from protocol.packed import CODEC_PLANES, PackedSection
from shardcast.ways import MAX_LINKS, Ask, Chain, Full, Packed, WhyFull, choose

FULL_BYTES = 1000


def version(number: int, base: Manifest | None = None, size: int = 10, codec: str = CODEC_WORDS) -> Manifest:
    """A version of `FULL_BYTES`; with a base, a delta of `size` bytes to it."""
    digest = Digest.of(b"files %d" % number)
    tree = tree_digest([digest])
    delta = None
    if base is not None:
        blob = Digest.of(b"blob %d" % number)
        shards = (BlobShard(0, size, blob),)
        delta = DeltaSection(codec, base.policy_version, digest_of(base), size, tree_digest([blob]), shards)
    return Manifest(
        "run", number, (ManifestFile("w", FULL_BYTES, tree),), (Shard(0, 0, FULL_BYTES, digest),), tree, delta
    )


def digest_of(manifest: Manifest) -> Digest:
    return manifest_digest(manifest.to_json_bytes())


def chain(length: int, size: int = 10) -> list[Manifest]:
    """Versions 0 to `length`, each a delta to the one before."""
    versions = [version(0)]
    for number in range(1, length + 1):
        versions.append(version(number, versions[-1], size))
    return versions


V = chain(MAX_LINKS + 1)
KNOWN = {digest_of(each): each for each in V}
NAMES = {each.policy_version: digest_of(each) for each in V}


def held(*numbers: int) -> dict[int, Digest]:
    return {number: NAMES[number] for number in numbers}


@pytest.mark.parametrize(
    ("target", "here", "known", "decision"),
    [
        (V[0], held(), {}, Full(WhyFull.KEYFRAME)),
        (V[1], held(), {}, Full(WhyFull.NO_BASE)),
        (V[1], held(0), {}, Chain(0, (V[1],), 10)),
        (V[5], held(4), {}, Chain(4, (V[5],), 10)),
        (V[5], held(0, 4), {}, Chain(4, (V[5],), 10)),
        (V[5], held(3), {}, Ask(4, NAMES[4])),
        (V[5], held(3), {NAMES[4]: V[4]}, Chain(3, (V[4], V[5]), 20)),
        (V[5], held(3), {NAMES[4]: None}, Full(WhyFull.UNKNOWN)),
        (V[5], held(6), KNOWN, Full(WhyFull.NO_BASE)),
        (V[5], {4: NAMES[3]}, KNOWN, Full(WhyFull.NO_BASE)),
        (V[MAX_LINKS], held(0), KNOWN, Chain(0, tuple(V[1:-1]), 10 * MAX_LINKS)),
        (V[MAX_LINKS + 1], held(0), KNOWN, Full(WhyFull.TOO_MUCH)),
        (version(1, V[0], codec="words-2"), held(0), {}, Full(WhyFull.CODEC)),
        (version(1, V[0], size=FULL_BYTES), held(0), {}, Full(WhyFull.TOO_MUCH)),
        (version(1, V[0], size=FULL_BYTES - 1), held(0), {}, Chain(0, (version(1, V[0], size=FULL_BYTES - 1),), 999)),
    ],
)
def test_decisions(
    target: Manifest, here: dict[int, Digest], known: dict[Digest, Manifest | None], decision: object
) -> None:
    assert choose(target, FULL_BYTES, here, known) == decision


def test_a_chain_that_is_no_less_than_the_files_is_not_taken() -> None:
    versions = chain(3, size=400)
    known = {digest_of(each): each for each in versions}
    for behind, expected in ((2, Chain), (1, Chain), (0, Full)):
        here = {behind: digest_of(versions[behind])}
        assert isinstance(choose(versions[3], FULL_BYTES, here, known), expected), behind


def test_what_is_here_already_of_the_files_counts() -> None:
    assert choose(V[1], 11, held(0), {}) == Chain(0, (V[1],), 10)
    assert choose(V[1], 10, held(0), {}) == Full(WhyFull.TOO_MUCH)


def test_a_keyframe_on_the_way_ends_the_chain() -> None:
    keyframe = version(2)
    target = version(3, keyframe)
    assert choose(target, FULL_BYTES, held(0), {digest_of(keyframe): keyframe}) == Full(WhyFull.KEYFRAME)


def test_a_manifest_of_another_number_under_the_bases_digest_is_no_base() -> None:
    base = version(9)
    section = version(5, V[4]).delta
    assert section is not None
    target = replace(V[5], delta=replace(section, base_digest=digest_of(base)))
    assert choose(target, FULL_BYTES, held(2), {digest_of(base): base}) == Full(WhyFull.UNKNOWN)


def packed(manifest: Manifest, size: int, codec: str = CODEC_PLANES) -> Manifest:
    blob = Digest.of(b"packed")
    section = PackedSection(codec, size, tree_digest([blob]), (BlobShard(0, size, blob),))
    return replace(manifest, packed=section, torrent_info_hash="0" * 40)


@pytest.mark.parametrize(
    ("target", "here", "missing", "lacking", "decision"),
    [
        (packed(V[0], 600), held(), FULL_BYTES, 600, Packed(600)),
        (packed(V[1], 600), held(), FULL_BYTES, 600, Packed(600)),
        (packed(V[1], 600), held(0), FULL_BYTES, 600, Chain(0, (packed(V[1], 600),), 10)),
        (packed(V[1], 600), held(0), FULL_BYTES, 5, Packed(5)),  # most of it is here already
        (packed(V[0], 600), held(), 600, 600, Full(WhyFull.KEYFRAME)),  # most of the files are
        (packed(V[0], 600), held(), 300, 200, Packed(200)),
        (packed(V[0], 600), held(), FULL_BYTES, None, Full(WhyFull.KEYFRAME)),  # it failed
        (packed(V[0], 600, "planes-2"), held(), FULL_BYTES, 600, Full(WhyFull.KEYFRAME)),
    ],
)
def test_packed_where_it_is_less(
    target: Manifest, here: dict[int, Digest], missing: int, lacking: int | None, decision: object
) -> None:
    assert choose(target, missing, here, {}, lacking) == decision
