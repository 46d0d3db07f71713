"""shardcast.delta.apply: what comes out right is kept, what comes out wrong stays missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from protocol.manifest import Digest, Manifest, ManifestFile, Shard, manifest_digest, sign_manifest
from protocol.signing import Identity
from shardcast.delta.apply import Applier
from shardcast.delta.blob import sections_of
from shardcast.delta.errors import BaseUnreadable, InvalidDelta
from shardcast.delta.frames import Bytes
from shardcast.partial import PartialVersion
from tests.unit.shardcast.delta.versions import manifest, write

SHARDS = 6
DATA = bytes(range(10)) * SHARDS


class Made:
    """Gives the right bytes, but for some shards, which are wrong or raise."""

    def __init__(self, files: Sequence[ManifestFile], wrong: dict[int, Exception | None], span: int = 10) -> None:
        self.files = files
        shards = [Shard(0, at, 10, Digest.of(b"")) for at in range(0, len(DATA), 10)]
        self.sections = sections_of(shards, span)
        self._wrong = wrong
        self.read_shards: list[int] = []

    def read(self, file: int, offset: int, out: Bytes) -> None:
        index = offset // 10
        self.read_shards.append(index)
        if index in self._wrong:
            fault = self._wrong[index]
            if fault is not None:
                raise fault
            out[:] = 0xFF
        else:
            out[:] = bytearray(DATA[offset : offset + len(out)])


@pytest.fixture
def target(tmp_path: Path) -> Manifest:
    return manifest(write(tmp_path / "target", {"w": DATA}), 2, shard=10)


@pytest.fixture
def partial(tmp_path: Path, target: Manifest) -> PartialVersion:
    envelope = sign_manifest(target, Identity.from_seed(b"t" * 32))
    opened = PartialVersion(tmp_path / "partial", envelope, target, manifest_digest(envelope.payload))
    opened.open()
    return opened


@pytest.mark.parametrize("threads", [1, 3])
def test_all_shards_are_made_and_told(partial: PartialVersion, target: Manifest, threads: int) -> None:
    told: list[int] = []
    applied = Applier(partial, Made(target.files, {}), threads=threads, on_shard=told.append).run()
    assert (applied.right, applied.wrong, applied.fault) == (SHARDS, 0, None)
    assert sorted(told) == list(range(SHARDS)) and partial.missing == []
    assert (partial.folder / "w").read_bytes() == DATA
    partial.close()


def test_what_is_wrong_stays_missing_and_the_rest_is_kept(partial: PartialVersion, target: Manifest) -> None:
    faults: dict[int, Exception | None] = {1: None, 3: InvalidDelta("no"), 4: BaseUnreadable("gone")}
    applied = Applier(partial, Made(target.files, faults)).run()
    assert (applied.right, applied.wrong) == (3, 3)
    assert isinstance(applied.fault, InvalidDelta)
    assert partial.missing == [1, 3, 4]
    partial.close()


def test_only_what_is_missing_is_made(partial: PartialVersion, target: Manifest) -> None:
    Applier(partial, Made(target.files, {0: None, 5: None})).run()
    second = Made(target.files, {})
    assert Applier(partial, second).run().right == 2
    assert second.read_shards == [0, 5]
    partial.close()


def test_a_section_of_which_some_is_here_is_made_for_the_rest(partial: PartialVersion, target: Manifest) -> None:
    Applier(partial, Made(target.files, {1: None})).run()
    assert partial.missing == [1]
    told: list[int] = []
    second = Made(target.files, {}, span=25)
    assert Applier(partial, second, on_shard=told.append).run().right == 1
    assert (second.read_shards, told) == ([0], [1])
    partial.close()


def test_it_stops_when_told(partial: PartialVersion, target: Manifest) -> None:
    made = Made(target.files, {})
    applier = Applier(partial, made, on_shard=lambda index: applier.stop())
    applied = applier.run()
    assert (applied.right, applied.wrong) == (1, SHARDS - 1)
    assert made.read_shards == [0]
    partial.close()


def test_a_disk_that_fails_ends_it_at_once(partial: PartialVersion, target: Manifest) -> None:
    (partial.folder / "w").unlink()
    made = Made(target.files, {})
    with pytest.raises(FileNotFoundError):
        Applier(partial, made).run()
    assert len(made.read_shards) <= 2
    partial.close()
