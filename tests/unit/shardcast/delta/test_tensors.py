"""shardcast.delta.tensors: weights in memory become the next version's, or stay what they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from protocol.manifest import Manifest, manifest_digest
from shardcast.delta.encode import delta_section
from shardcast.delta.errors import InvalidDelta, NotTheBaseError
from shardcast.delta.tensors import TensorsView, apply_to_tensors
from tests.unit.shardcast.delta.versions import SHARD, make_blob, manifest, safetensors, step, words, write

Arrays = dict[str, np.ndarray]


def file_of(tensors: Arrays) -> bytes:
    kinds = {np.dtype(np.uint16): "BF16", np.dtype(np.float32): "F32"}
    return safetensors({name: (kinds[array.dtype], array.tobytes()) for name, array in tensors.items()})


def header_of(data: bytes) -> bytes:
    return data[: 8 + int.from_bytes(data[:8], "little")]


class Step:
    """Two versions in folders, the delta between them, and the first one's tensors in memory."""

    def __init__(self, root: Path, new: Arrays | None = None) -> None:
        self.old: Arrays = {"head": words(5000).reshape(50, 100), "norm": np.ones(7, np.float32), "w": words(3001, 1)}
        self.old["tied"] = self.old["head"].copy()
        if new is None:
            head = step(self.old["head"].reshape(-1), 0.05).reshape(50, 100)
            new = {"head": head, "norm": self.old["norm"] * 2, "w": step(self.old["w"], 0.01), "tied": head}
        self.new = new
        self.data = file_of(self.old)
        base = write(root / "base", {"model.safetensors": self.data, "config.json": b"{}"})
        target = write(root / "target", {"model.safetensors": file_of(self.new), "config.json": b'{"x": 1}'})
        self.blob = make_blob(base, target, root / "blob")
        self.base = manifest(base, 1)
        section = delta_section(root / "blob", 1, manifest_digest(self.base.to_json_bytes()), SHARD)
        self.target = replace(manifest(target, 2), delta=section)
        self.held = {name: array.copy() for name, array in self.old.items()}

    def view(self) -> TensorsView:
        return TensorsView(self.base.files, {"model.safetensors": header_of(self.data)}, self.held)

    def apply(self, base: Manifest | None = None, blob: bytes | None = None) -> None:
        data = self.blob if blob is None else blob
        apply_to_tensors(self.view(), base or self.base, self.target, lambda at, count: data[at : at + count])

    def is_still_old(self) -> bool:
        return all(np.array_equal(self.held[name], array) for name, array in self.old.items())


@pytest.fixture
def pair(tmp_path: Path) -> Step:
    return Step(tmp_path)


def test_the_tensors_become_the_next_versions(pair: Step) -> None:
    pair.apply()
    for name, array in pair.new.items():
        assert np.array_equal(pair.held[name], array), name
    assert pair.held["head"].shape == (50, 100)


def test_a_second_application_is_refused(pair: Step) -> None:
    pair.apply()
    with pytest.raises(NotTheBaseError, match="not those of version 1"):
        pair.apply()
    assert all(np.array_equal(pair.held[name], array) for name, array in pair.new.items())


def test_another_base_is_refused(pair: Step) -> None:
    with pytest.raises(NotTheBaseError, match="no difference to version 0"):
        pair.apply(base=replace(pair.base, policy_version=0))
    assert pair.is_still_old()


def test_one_wrong_word_in_memory_is_noticed(pair: Step) -> None:
    pair.held["w"][17] ^= 1
    with pytest.raises(NotTheBaseError, match="not those"):
        pair.apply()
    pair.held["w"][17] ^= 1
    assert pair.is_still_old()


def test_a_blob_that_makes_something_else_changes_nothing(pair: Step) -> None:
    damaged = bytearray(pair.blob)
    damaged[-1] ^= 0xFF
    with pytest.raises(InvalidDelta):
        pair.apply(blob=bytes(damaged))
    assert pair.is_still_old()


def test_another_layout_can_not_be_made_in_place(tmp_path: Path) -> None:
    old = Step(tmp_path / "a").old
    swapped = {"w": old["w"], "head": old["head"], "norm": old["norm"], "tied": old["tied"]}
    longer = {**old, "w": np.concatenate([old["w"], old["w"]])}
    for name, new in (("swapped", swapped), ("longer", longer)):
        pair = Step(tmp_path / name, new)
        with pytest.raises(InvalidDelta, match="load it whole"):
            pair.apply()
        assert pair.is_still_old()


@pytest.mark.parametrize("what", ["absent", "size", "strides", "frozen", "header"])
def test_tensors_that_the_header_does_not_describe_are_refused(pair: Step, what: str) -> None:
    header = header_of(pair.data)
    if what == "absent":
        del pair.held["w"]
    elif what == "size":
        pair.held["w"] = pair.held["w"][:-1].copy()
    elif what == "strides":
        pair.held["head"] = pair.held["head"].T
    elif what == "frozen":
        pair.held["w"].flags.writeable = False
    else:
        header = header[:-1]
    with pytest.raises(NotTheBaseError):
        TensorsView(pair.base.files, {"model.safetensors": header}, pair.held)
