"""shardcast.torrent: the torrent that follows from a manifest, held against libtorrent's own reading of it."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import libtorrent
import pytest

from protocol.manifest import Manifest
from shardcast.publish import describe
from shardcast.torrent import InvalidTorrent, Layout, PieceHasher

KIB, MIB = 2**10, 2**20
SIZES = (3 * 64 * KIB + 17, 0, 2 * 64 * KIB, 100)


def hashed(layout: Layout, files: list[bytes], step: int = 10_007) -> bytes:
    hasher = PieceHasher(layout)
    for data in files:
        for at in range(0, len(data), step):
            hasher.update(data[at : at + step])
        hasher.end_file()
    return hasher.digest()


@pytest.fixture
def files() -> list[bytes]:
    return [random.Random(size).randbytes(size) for size in SIZES]


@pytest.fixture
def layout() -> Layout:
    made = Layout.for_files(7, SIZES, [0, 64 * KIB, 128 * KIB])
    assert made is not None
    return made


def test_libtorrent_reads_the_same_torrent(layout: Layout, files: list[bytes]) -> None:
    hashes = hashed(layout, files)
    torrent = layout.torrent(hashes)
    parameters = libtorrent.load_torrent_buffer(torrent)
    info = parameters.ti
    assert info is not None and info.priv() and info.name() == "7"
    assert str(parameters.info_hashes.v1) == layout.info_hash(hashes)
    assert (info.piece_length(), info.num_pieces()) == (layout.piece_bytes, layout.pieces) == (64 * KIB, 7)
    assert len(torrent) == layout.torrent_size
    storage = info.layout()
    real = {at: storage.file_size(at) for at in range(storage.num_files()) if not storage.file_flags(at) & 1}
    assert {layout.places()[at]: size for at, size in real.items()} == {0: SIZES[0], 2: SIZES[2], 3: SIZES[3]}
    starts = [storage.file_offset(at) for at in real]
    assert all(start % layout.piece_bytes == 0 for start in starts)


def test_pieces_are_hashed_with_their_padding(layout: Layout, files: list[bytes]) -> None:
    size = layout.piece_bytes
    pieces = [data[at : at + size] for data in files for at in range(0, len(data), size)]
    expected = [hashlib.sha1(layout.padded(at, piece)).digest() for at, piece in enumerate(pieces)]
    assert [len(layout.padded(at, piece)) for at, piece in enumerate(pieces)] == [size] * 6 + [100]
    for step in (1000, size, 3 * size + 1):
        assert hashed(layout, files, step) == b"".join(expected)


def test_what_is_published_checks_out_and_shards_are_whole_pieces(tmp_path: Path, files: list[bytes]) -> None:
    for name, data in zip("abcd", files, strict=True):
        (tmp_path / name).write_bytes(data)
    described = describe(tmp_path, run_id="run", policy_version=3, shard_bytes=128 * KIB)
    assert described == describe(tmp_path, run_id="run", policy_version=3, shard_bytes=128 * KIB)
    manifest, torrent = described.manifest, described.torrent
    assert torrent is not None and manifest.torrent_info_hash is not None
    layout = Layout.of(manifest)
    assert layout is not None
    layout.check(torrent, manifest.torrent_info_hash)
    assert Manifest.from_json_bytes(manifest.to_json_bytes()) == manifest
    spans = layout.pieces_of(manifest.shards)
    assert [piece for span in spans for piece in span] == list(range(layout.pieces))


def test_any_other_torrent_is_refused(layout: Layout, files: list[bytes]) -> None:
    hashes = hashed(layout, files)
    torrent, info_hash = layout.torrent(hashes), layout.info_hash(hashes)
    layout.check(torrent, info_hash)
    assert layout.hashes_in(torrent) == hashes
    other_layout = Layout.for_files(7, SIZES[::-1], [0, 64 * KIB])
    assert other_layout is not None
    for wrong in (
        b"",
        torrent[:-1],
        torrent + b"e",
        torrent.replace(b"7:privatei1e", b"7:privatei0e"),
        other_layout.torrent(hashes),
    ):
        with pytest.raises(InvalidTorrent, match="layout"):
            layout.check(wrong, info_hash)
    other_hashes = bytes([hashes[0] ^ 1]) + hashes[1:]
    with pytest.raises(InvalidTorrent, match="info-hash"):
        layout.check(layout.torrent(other_hashes), info_hash)


@pytest.mark.parametrize(
    ("total", "offsets", "piece_bytes"),
    [
        (10 * MIB, [0, 2 * MIB, 4 * MIB], 64 * KIB),
        (256 * MIB, [0, 2 * MIB], 256 * KIB),
        (256 * MIB, [0, 64 * KIB], 64 * KIB),
        (16 * 2**30, [0, 8 * MIB], MIB),
        (140 * 2**30, [0, 8 * MIB], 8 * MIB),
        (2**42, [0, 8 * MIB], 8 * MIB),
        (5, [0], 64 * KIB),
    ],
)
def test_pieces_divide_shards_and_are_neither_few_nor_many(total: int, offsets: list[int], piece_bytes: int) -> None:
    layout = Layout.for_files(0, [total], offsets)
    assert layout is not None and layout.piece_bytes == piece_bytes


def test_shards_that_no_piece_divides_have_no_torrent() -> None:
    assert Layout.for_files(0, [100_000], [0, 1000]) is None
    assert Layout.for_files(0, [0, 0], []) is None
