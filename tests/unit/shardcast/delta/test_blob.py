"""shardcast.delta.blob: blobs that an attacker made are refused, and nothing else happens."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.manifest import Manifest
from shardcast.delta.blob import (
    BLOCK,
    FRAME,
    HEAD,
    MAGIC,
    MAX_BLOCK_BYTES,
    MAX_BLOCKS,
    MAX_SPAN,
    SPAN,
    WORDS,
    Blob,
    Kind,
    sections_of,
)
from shardcast.delta.errors import InvalidDelta
from tests.unit.shardcast.delta.versions import apply, make_blob, manifest, safetensors, step, words, write

SIZE = 3000
DATA = bytes(range(250)) * 12


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path / "base", {"a": DATA})


@pytest.fixture
def target(base: Path) -> Manifest:
    """One file in one shard, as the base."""
    return manifest(base, 2)


def blob_of(*sections: bytes) -> bytes:
    sizes = struct.pack(f"<{len(sections)}I", *map(len, sections))
    return HEAD.pack(MAGIC, SPAN, len(sections)) + sizes + b"".join(sections)


def block(kind: int, size: int, offset: int = 0, file: int = 0, rest: bytes = b"", zero: int = 0) -> bytes:
    return BLOCK.pack(kind, zero, file, size, offset) + rest


def frame(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


def framed(content: bytes) -> bytes:
    return FRAME.pack(len(frame(content))) + frame(content)


def difference(content: bytes, declared: int | None = None, gaps: int = 0) -> bytes:
    size = len(content) if declared is None else declared
    return WORDS.pack(0, 0, 0, gaps, len(frame(content)), size) + frame(content)


def test_what_the_layout_says_is_what_is_made(base: Path, target: Manifest) -> None:
    """A blob written by hand, of every kind of block."""
    xor = bytes(10) + b"\x01" + bytes(9)
    section = (
        block(Kind.COPY, 100)
        + block(Kind.XOR, 20, 100, rest=framed(xor))
        + block(Kind.RAW, 80, rest=framed(b"r" * 80))
        + block(Kind.TWIN, 200, 0)
        + block(Kind.WORDS, 2, 400, rest=difference(bytes([0, 0, 0]), gaps=1))
        + block(Kind.COPY, SIZE - 402, 402)
    )
    made = apply(base, blob_of(section), target)["a"]
    head = bytearray(DATA[:120] + b"r" * 80)
    head[110] ^= 1
    (old,) = struct.unpack_from("<H", DATA, 400)
    assert made == bytes(head) * 2 + struct.pack("<H", old + 1 if old < 0x8000 else old - 1) + DATA[402:]


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"", "head alone"),
        (MAGIC[:7] + b"\x02" + bytes(100), "update it"),
        (HEAD.pack(MAGIC, SPAN, 2) + bytes(8), "has 2 sections"),
        (HEAD.pack(MAGIC, 0, 1) + bytes(8), "would span 0"),
        (HEAD.pack(MAGIC, MAX_SPAN + 1, 1) + bytes(8), "would span"),
        (HEAD.pack(MAGIC, SPAN, 1) + bytes(3), "table alone"),
        (blob_of(block(Kind.COPY, SIZE))[:-1], "sections need"),
        (blob_of(block(Kind.COPY, SIZE)) + b"x", "sections need"),
        (HEAD.pack(MAGIC, SPAN, 1) + struct.pack("<I", 2**31), "too many"),
        (blob_of(b""), "makes 0 of 3000"),
        (blob_of(block(Kind.COPY, SIZE - 1)), "makes 2999 of 3000"),
        (blob_of(block(Kind.COPY, SIZE + 1)), "makes too much"),
        (blob_of(block(Kind.COPY, SIZE) + block(Kind.COPY, 1)), "makes too much"),
        (blob_of(block(Kind.COPY, 0) + block(Kind.COPY, SIZE)), "means nothing"),
        (blob_of(block(5, SIZE)), "means nothing"),
        (blob_of(block(Kind.COPY, SIZE, zero=1)), "means nothing"),
        (blob_of(block(Kind.COPY, SIZE)[:-1]), "means nothing"),
        (blob_of(block(Kind.COPY, SIZE, 1)), "beyond a file"),
        (blob_of(block(Kind.COPY, SIZE, 2**63)), "beyond a file"),
        (blob_of(block(Kind.COPY, SIZE, file=1)), "beyond a file"),
        (blob_of(block(Kind.XOR, SIZE, 1, rest=framed(bytes(SIZE)))), "beyond a file"),
        (blob_of(block(Kind.XOR, SIZE, rest=FRAME.pack(50))), "cut off"),
        (blob_of(block(Kind.RAW, SIZE, 8, rest=framed(bytes(SIZE)))), "doesn't need"),
        (blob_of(block(Kind.RAW, SIZE, rest=framed(bytes(SIZE - 1)))), "declares"),
        (blob_of(block(Kind.TWIN, SIZE)), "comes after"),
        (blob_of(block(Kind.COPY, 100) + block(Kind.TWIN, SIZE - 100, 50)), "comes after"),
        (blob_of(block(Kind.COPY, 100) + block(Kind.TWIN, SIZE - 100, 0, file=1)), "comes after"),
        (
            blob_of(block(Kind.COPY, 10) + block(Kind.TWIN, 10) + block(Kind.TWIN, 20) + block(Kind.COPY, SIZE - 40)),
            "a copy",
        ),
        (blob_of(block(Kind.WORDS, SIZE - 1, rest=difference(b"")) + block(Kind.COPY, 1)), "impossible size"),
        (blob_of(block(Kind.WORDS, SIZE, rest=difference(b"", declared=2**31))), "impossible size"),
        (blob_of(block(Kind.WORDS, SIZE, rest=difference(b"x"))), "too many"),
        (blob_of(block(Kind.WORDS, SIZE, rest=difference(b"", gaps=1))), "too early"),
        (blob_of(block(Kind.WORDS, SIZE, rest=WORDS.pack(0, 0, 1, 0, 0, 0))), "means nothing"),
    ],
)
def test_what_breaks_the_format_is_refused(base: Path, target: Manifest, blob: bytes, message: str) -> None:
    with pytest.raises(InvalidDelta, match=message):
        apply(base, blob, target)


def test_a_section_makes_consecutive_shards_of_one_file(tmp_path: Path) -> None:
    files = manifest(write(tmp_path / "many", {"a": bytes(50), "b": bytes(25), "c": bytes(3)}), 1, shard=10)

    def sections(span: int) -> list[tuple[int, int, int, int, int]]:
        return [(each.file, each.offset, each.size, each.first, each.stop) for each in sections_of(files.shards, span)]

    assert sections(29) == [(0, 0, 20, 0, 2), (0, 20, 20, 2, 4), (0, 40, 10, 4, 5), (1, 0, 25, 5, 8), (2, 0, 3, 8, 9)]
    assert len(sections(1)) == len(files.shards)
    assert sections(10**6) == [(0, 0, 50, 0, 5), (1, 0, 25, 5, 8), (2, 0, 3, 8, 9)]


def test_blocks_are_bounded_in_number_and_size(tmp_path: Path) -> None:
    size = MAX_BLOCK_BYTES + 2
    files = manifest(write(tmp_path / "large", {"a": bytes(size)}), 1, shard=2 * size)
    many = block(Kind.COPY, 1) * (MAX_BLOCKS + 1) + block(Kind.COPY, size - MAX_BLOCKS - 1)
    huge = block(Kind.XOR, size, rest=framed(b""))
    for section, message in ((many, "makes too much"), (huge, "at once")):
        blob = blob_of(section)
        with pytest.raises(InvalidDelta, match=message):
            Blob(lambda at, count, blob=blob: blob[at : at + count], len(blob), files, files.files).blocks(0)


def test_a_bomb_costs_no_memory(base: Path, target: Manifest) -> None:
    bomb = frame(bytes(200 * 2**20))
    rest = WORDS.pack(0, 0, 0, 0, len(bomb), 8 * SIZE) + bomb
    tracemalloc.start()
    with pytest.raises(InvalidDelta):
        apply(base, blob_of(block(Kind.WORDS, SIZE, rest=rest)), target)
    with pytest.raises(InvalidDelta):
        apply(base, blob_of(block(Kind.RAW, SIZE, rest=FRAME.pack(len(bomb)) + bomb)), target)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@settings(max_examples=150, deadline=None)
@given(place=st.floats(0, 1), value=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_blob_is_refused_or_makes_other_bytes(
    place: float, value: int, cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, new, blob = _pair(tmp_path_factory)
    damaged = bytearray(blob)
    at = int(place * (len(blob) - 1))
    if cut:
        del damaged[at:]
    else:
        damaged[at] ^= value
    try:
        made = apply(folder, bytes(damaged), new)
    except InvalidDelta:
        return
    assert {path: len(data) for path, data in made.items()} == {file.path: file.size for file in new.files}


_PAIRS: list[tuple[Path, Manifest, bytes]] = []


def _pair(factory: pytest.TempPathFactory) -> tuple[Path, Manifest, bytes]:
    if not _PAIRS:
        root = factory.mktemp("pair")
        weights = words(6000)
        old = safetensors({"w": ("BF16", weights.tobytes()), "s": ("F32", np.arange(9, dtype=np.float32).tobytes())})
        new = safetensors(
            {"w": ("BF16", step(weights, 0.05).tobytes()), "s": ("F32", np.arange(1, 10, dtype=np.float32).tobytes())}
        )
        base, target = write(root / "base", {"m.safetensors": old}), write(root / "target", {"m.safetensors": new})
        _PAIRS.append((base, manifest(target, 2), make_blob(base, target, root / "blob")))
    return _PAIRS[0]
