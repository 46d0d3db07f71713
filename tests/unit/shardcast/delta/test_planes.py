"""shardcast.delta.planes, and whole versions packed by them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from protocol.manifest import Manifest
from shardcast.delta.blob import BLOCK, FRAME, HEAD, MAGIC, Blob, Kind
from shardcast.delta.decode import DeltaView
from shardcast.delta.encode import DeltaTooLargeError, encode_packed
from shardcast.delta.errors import InvalidDelta
from shardcast.delta.frames import open_frame
from shardcast.delta.planes import join_planes, pack_planes
from shardcast.delta.views import FolderView
from tests.unit.shardcast.delta.versions import SHARD, manifest, read_all, safetensors, words, write


@settings(deadline=None, max_examples=50)
@given(arrays(np.uint16, st.integers(1, 300)))
def test_every_bit_pattern_comes_back(given_words: np.ndarray) -> None:
    frame, others = pack_planes(given_words)
    made = np.empty_like(given_words)
    join_planes(open_frame(frame, len(given_words)), others, made)
    assert np.array_equal(made, given_words)


def test_all_words_there_are_come_back_and_weights_weigh_a_third_less() -> None:
    every = np.arange(2**16, dtype=np.uint16)
    made = np.empty_like(every)
    frame, others = pack_planes(every)
    join_planes(open_frame(frame, len(every)), others, made)
    assert np.array_equal(made, every)
    weights = words(200_000)
    frame, others = pack_planes(weights)
    assert len(frame) + len(others) < 0.7 * weights.nbytes


def packed(folder: Path, path: Path, *, share: float = 1.0, shard: int = SHARD) -> tuple[Manifest, bytes]:
    target = manifest(folder, 3, shard)
    encode_packed(folder, target, path, limit=int(share * target.total_bytes) + 200)
    return target, path.read_bytes()


def unpacked(target: Manifest, blob: bytes, tmp_path: Path) -> dict[str, bytes]:
    with FolderView(tmp_path, ()) as nothing:
        return read_all(
            DeltaView(nothing, target, lambda offset, count: blob[offset : offset + count], len(blob)), target
        )


@pytest.mark.parametrize("shard", [SHARD, 1000, 7, 10**6])
def test_a_version_is_made_of_its_packed_form_alone(tmp_path: Path, shard: int) -> None:
    weights = words(60_000 if shard > 7 else 3000)
    half = len(weights) // 2
    tensors = {
        "head": ("BF16", weights[:half].tobytes()),
        "scale": ("F32", np.arange(5, dtype=np.float32).tobytes() + b"odd"),
        "layers": ("BF16", weights[half:].tobytes()),
    }
    files = {"model.safetensors": safetensors(tensors), "config.json": b"{}", "empty": b"", "x.bin": bytes(500)}
    target, blob = packed(write(tmp_path / "v", files), tmp_path / "blob", shard=shard, share=20.0)
    assert unpacked(target, blob, tmp_path) == files
    if shard >= SHARD:
        assert len(blob) < 0.75 * target.total_bytes


def test_a_tied_tensor_is_sent_once(tmp_path: Path) -> None:
    weights = words(50_000).tobytes()
    tensors = {"embed": ("BF16", weights), "head": ("BF16", weights)}
    files = {"model.safetensors": safetensors(tensors)}
    target, blob = packed(write(tmp_path / "v", files), tmp_path / "blob")
    assert unpacked(target, blob, tmp_path) == files
    assert len(blob) < 0.36 * target.total_bytes


def test_noise_is_not_worth_it(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 2**16, 50_000).astype(np.uint16)
    folder = write(tmp_path / "v", {"model.safetensors": safetensors({"w": ("BF16", noise.tobytes())})})
    with pytest.raises(DeltaTooLargeError):
        packed(folder, tmp_path / "blob", share=0.9)


def test_the_same_files_make_the_same_blob_whatever_the_threads(tmp_path: Path) -> None:
    folder = write(tmp_path / "v", {"model.safetensors": safetensors({"w": ("BF16", words(50_000).tobytes())})})
    target = manifest(folder, 3)
    for threads in (1, 3):
        encode_packed(folder, target, tmp_path / str(threads), limit=10**6, threads=threads)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "3").read_bytes()


def block(size: int, frame: bytes, plain: bytes, *, kind: int = Kind.PLANES, file: int = 0, offset: int = 0) -> bytes:
    return BLOCK.pack(kind, 0, file, size, offset) + FRAME.pack(len(frame)) + frame + plain


FRAME_OF_8 = pack_planes(np.zeros(8, np.uint16))[0]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (block(16, FRAME_OF_8, bytes(7)), "cut off"),
        (block(15, FRAME_OF_8, bytes(7)), "impossible size"),
        (block(16, FRAME_OF_8, bytes(8), file=1), "doesn't need"),
        (block(16, FRAME_OF_8, bytes(8), offset=1), "doesn't need"),
        (block(14, FRAME_OF_8, bytes(7)), "makes 14 of 16"),
        (block(18, FRAME_OF_8, bytes(9)), "too much"),
        (block(16, FRAME_OF_8[:-1], bytes(8)), "damaged"),
        (block(16, pack_planes(np.zeros(9, np.uint16))[0], bytes(8)), "declares 9 bytes where 8 are due"),
        (BLOCK.pack(Kind.COPY, 0, 0, 16, 0), "beyond a file"),
    ],
)
def test_a_hostile_block_is_refused(tmp_path: Path, section: bytes, message: str) -> None:
    target = manifest(write(tmp_path / "v", {"a": bytes(16)}), 3)
    blob = HEAD.pack(MAGIC, SHARD, 1) + len(section).to_bytes(4, "little") + section
    with pytest.raises(InvalidDelta, match=message):
        unpacked(target, blob, tmp_path)


def test_a_block_that_would_make_too_much_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    size = 2**30
    target = manifest(write(tmp_path / "v", {"a": bytes(16)}), 3)
    section = block(size, FRAME_OF_8, bytes(8))
    blob = HEAD.pack(MAGIC, SHARD, 1) + len(section).to_bytes(4, "little") + section
    with pytest.raises(InvalidDelta):
        Blob(lambda offset, count: blob[offset : offset + count], len(blob), target, ()).blocks(0)
