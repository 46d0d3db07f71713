"""Encoder and decoder together, on versions in folders."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcast.delta.decode import BlobFile, DeltaView
from shardcast.delta.encode import DeltaTooLargeError, encode_delta
from shardcast.delta.errors import BaseUnreadable, InvalidDelta
from shardcast.delta.views import FolderView
from tests.unit.shardcast.delta.versions import (
    SHARD,
    apply,
    make_blob,
    manifest,
    read_all,
    safetensors,
    step,
    words,
    write,
)

WEIGHTS = words(9000)


def model(weights: np.ndarray, *, tied: bool = True, extra: bytes = b"") -> bytes:
    """A head that ends in the middle of a shard, a scale in float32, layers, and maybe an embedding tied to the head."""
    tensors = {
        "head": ("BF16", weights[:3001].tobytes()),
        "scale": ("F32", np.arange(5, dtype=np.float32).tobytes() + extra),
        "layers": ("BF16", weights[3001:].tobytes()),
    }
    if tied:
        tensors["zembed"] = ("BF16", weights[:3001].tobytes())
    return safetensors(tensors)


def check(tmp_path: Path, old: dict[str, bytes], new: dict[str, bytes], shard: int = SHARD, span: int = SHARD) -> int:
    """Make and apply a delta; the blob's size."""
    base, target = write(tmp_path / "base", old), write(tmp_path / "target", new)
    blob = make_blob(base, target, tmp_path / "blob", shard=shard, span=span)
    assert apply(base, blob, manifest(target, 2, shard), shard) == new
    return len(blob)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 1.0])
@pytest.mark.parametrize("tied", [False, True])
def test_a_trained_model_round_trips(tmp_path: Path, share: float, tied: bool) -> None:
    old = {"model.safetensors": model(WEIGHTS, tied=tied), "config.json": b"{}"}
    new = {"model.safetensors": model(step(WEIGHTS, share), tied=tied), "config.json": b"{}"}
    size = check(tmp_path, old, new)
    assert size < len(new["model.safetensors"]) * (0.05 if share < 0.01 else 0.5)


@pytest.mark.parametrize(("shard", "span"), [(1, 1), (7, 1), (7, 40), (1001, 3000), (1 << 20, 1 << 20)])
def test_shards_may_cut_words_and_tensors_anywhere(tmp_path: Path, shard: int, span: int) -> None:
    weights = WEIGHTS[:400] if shard < 100 else WEIGHTS
    data = {
        name: safetensors({"w": ("BF16", each.tobytes()), "x": ("U8", b"odd")}, pad=1)
        for name, each in (("old", weights), ("new", step(weights, 0.05)))
    }
    check(tmp_path, {"m.safetensors": data["old"]}, {"m.safetensors": data["new"]}, shard, span)


def test_nothing_changed_is_a_delta_of_next_to_nothing(tmp_path: Path) -> None:
    files = {"model.safetensors": model(WEIGHTS), "tokenizer.json": bytes(5000)}
    shards = sum(-(-len(data) // SHARD) for data in files.values())
    assert check(tmp_path, files, files) == 16 + 20 * shards


def test_tensors_that_moved_are_found_by_name(tmp_path: Path) -> None:
    """A longer header and a larger tensor in front: every byte lies elsewhere, and the layers are still a difference."""
    size = check(
        tmp_path,
        {"model.safetensors": model(WEIGHTS)},
        {"model.safetensors": model(step(WEIGHTS, 0.001), extra=bytes(8))},
    )
    assert size < 2500


def test_files_come_go_and_change_as_wholes(tmp_path: Path) -> None:
    same = os.urandom(9000)
    size = check(
        tmp_path,
        {"a.json": b"old", "gone.txt": bytes(900), "same": same, "model.safetensors": b"no header"},
        {
            "a.json": b"newer",
            "empty": b"",
            "new.bin": os.urandom(5000),
            "same": same,
            "model.safetensors": b"no headeR",
        },
    )
    assert 5000 < size < 5500


def test_threads_change_no_byte(tmp_path: Path) -> None:
    base = write(tmp_path / "base", {"model.safetensors": model(WEIGHTS)})
    target = write(tmp_path / "target", {"model.safetensors": model(step(WEIGHTS, 0.02))})
    one = make_blob(base, target, tmp_path / "one")
    assert make_blob(base, target, tmp_path / "three", threads=3) == one
    assert make_blob(base, target, tmp_path / "again") == one


def test_a_delta_over_its_limit_is_given_up(tmp_path: Path) -> None:
    base = write(tmp_path / "base", {"a.bin": bytes(9000)})
    target = write(tmp_path / "target", {"a.bin": os.urandom(9000)})
    old, new = manifest(base, 1), manifest(target, 2)
    with (
        FolderView(base, old.files) as before,
        FolderView(target, new.files) as after,
        pytest.raises(DeltaTooLargeError),
    ):
        encode_delta(before, after, new, tmp_path / "blob", limit=5000)


def test_any_range_can_be_read(tmp_path: Path) -> None:
    new = model(step(WEIGHTS, 0.05))
    base = write(tmp_path / "base", {"model.safetensors": model(WEIGHTS)})
    target = write(tmp_path / "target", {"model.safetensors": new})
    make_blob(base, target, tmp_path / "blob")
    random = np.random.default_rng(0)
    with FolderView(base, manifest(base, 1).files) as before, BlobFile(tmp_path / "blob") as blob:
        view = DeltaView(before, manifest(target, 2), blob.read, blob.size)
        for _ in range(60):
            begin, end = sorted(random.integers(0, len(new) + 1, 2).tolist())
            out = np.empty(end - begin, np.uint8)
            view.read(0, begin, out)
            assert out.tobytes() == new[begin:end]


def test_a_hundred_chained_deltas_reproduce_the_last_version(tmp_path: Path) -> None:
    """Each blob is applied to what the one before made, without anything in between on the disk."""
    weights, folder = WEIGHTS, write(tmp_path / "0", {"model.safetensors": model(WEIGHTS)})
    with FolderView(folder, manifest(folder, 1).files) as first:
        view: FolderView | DeltaView = first
        for number in range(1, 101):
            weights = step(weights, 0.01, seed=number)
            target = write(tmp_path / str(number), {"model.safetensors": model(weights)})
            blob = make_blob(folder, target, tmp_path / f"{number}.blob")
            view = DeltaView(view, manifest(target, 2), lambda at, count, blob=blob: blob[at : at + count], len(blob))
            folder = target
        assert isinstance(view, DeltaView)
        made = read_all(view, manifest(folder, 2))
    assert made["model.safetensors"] == model(weights)


def test_a_base_that_is_gone_or_short_is_said_so(tmp_path: Path) -> None:
    folder = write(tmp_path / "base", {"a": bytes(100)})
    files = manifest(folder, 1).files
    with FolderView(folder, files) as view:
        (folder / "a").write_bytes(bytes(50))
        view.read(0, 0, np.empty(50, np.uint8))
        with pytest.raises(BaseUnreadable, match="shorter"):
            view.read(0, 0, np.empty(51, np.uint8))
    (folder / "a").unlink()
    with pytest.raises(BaseUnreadable):
        FolderView(folder, files)


def test_a_damaged_base_gives_wrong_bytes_and_no_crash(tmp_path: Path) -> None:
    base = write(tmp_path / "base", {"model.safetensors": model(WEIGHTS)})
    target = write(tmp_path / "target", {"model.safetensors": model(step(WEIGHTS, 0.05))})
    blob = make_blob(base, target, tmp_path / "blob")
    data = bytearray((base / "model.safetensors").read_bytes())
    data[10_000] ^= 0xFF
    (base / "model.safetensors").write_bytes(data)
    try:
        made = apply(base, blob, manifest(target, 2))["model.safetensors"]
    except InvalidDelta:
        return  # the word's class moved, and the flags no longer fit
    assert made != (target / "model.safetensors").read_bytes()


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_two_files_round_trip(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    old, new = (data.draw(st.binary(max_size=200)) for _ in range(2))
    check(
        tmp_path_factory.mktemp("files"), {"f": old, "m.safetensors": new}, {"f": new, "m.safetensors": old}, shard=64
    )
