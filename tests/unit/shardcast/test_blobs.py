"""shardcast.blobs: deltas come and go with their versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.blob import BlobShard
from protocol.delta import CODEC_WORDS, DeltaSection
from protocol.errors import UserError
from protocol.manifest import Digest, tree_digest
from shardcast.blobs import BlobShelf, ShardLocation

DATA = b"0123456789"


def section(data: bytes = DATA) -> DeltaSection:
    parts = [data[:6], data[6:]]
    shards = (BlobShard(0, 6, Digest.of(parts[0])), BlobShard(6, len(data) - 6, Digest.of(parts[1])))
    digest = tree_digest(shard.digest for shard in shards)
    return DeltaSection(CODEC_WORDS, 0, Digest.of(b"base"), len(data), digest, shards)


@pytest.fixture
def shelf(tmp_path: Path) -> BlobShelf:
    (tmp_path / "deltas").mkdir()
    return BlobShelf(tmp_path / "deltas")


def put(tmp_path: Path, shelf: BlobShelf, version: int) -> Path:
    (tmp_path / "incoming").write_bytes(DATA)
    shelf.adopt(tmp_path / "incoming", section(), str(version))
    shelf.add(version, section(), str(version))
    return tmp_path / "deltas" / str(version)


def test_a_blob_is_offered_shard_by_shard_until_it_is_removed(tmp_path: Path, shelf: BlobShelf) -> None:
    path = put(tmp_path, shelf, 4)
    second = section().shards[1]
    assert shelf.locate(second.digest) == ShardLocation(4, path, 6, 4)
    assert shelf.holds(section().digest)
    shelf.remove(4)
    shelf.remove(4)
    assert shelf.locate(second.digest) is None and not shelf.holds(section().digest) and not path.exists()


def test_equal_blobs_of_two_versions_do_not_go_together(tmp_path: Path, shelf: BlobShelf) -> None:
    for version in (4, 5):
        put(tmp_path, shelf, version)
    shelf.remove(4)
    found = shelf.locate(section().shards[0].digest)
    assert found is not None and found.version == 5 and found.path.read_bytes() == DATA


@pytest.mark.parametrize("data", [None, b"short", DATA + b"x"])
def test_a_blob_that_is_not_there_at_its_size_is_refused(tmp_path: Path, shelf: BlobShelf, data: bytes | None) -> None:
    if data is not None:
        (tmp_path / "incoming").write_bytes(data)
    with pytest.raises(UserError, match="should have 10 bytes"):
        shelf.adopt(tmp_path / "incoming", section(), "4")


def test_a_link_is_refused(tmp_path: Path, shelf: BlobShelf) -> None:
    (tmp_path / "secret").write_bytes(DATA)
    (tmp_path / "incoming").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError):
        shelf.adopt(tmp_path / "incoming", section(), "4")


def test_what_was_adopted_before_a_crash_is_adopted_again(tmp_path: Path, shelf: BlobShelf) -> None:
    put(tmp_path, shelf, 4)
    shelf.adopt(tmp_path / "incoming", section(), "4")
    assert (tmp_path / "deltas" / "4").read_bytes() == DATA


def test_only_a_blob_of_its_size_is_offered(tmp_path: Path, shelf: BlobShelf) -> None:
    (tmp_path / "deltas" / "4").write_bytes(b"short")
    shelf.add(4, section(), "4")
    shelf.add(5, section(), "5")
    shelf.add(6, None, "4")
    assert not shelf.holds(section().digest)


def test_what_belongs_to_no_version_is_swept(tmp_path: Path, shelf: BlobShelf) -> None:
    kept = put(tmp_path, shelf, 4)
    (tmp_path / "deltas" / "left over").write_bytes(b"")
    (tmp_path / "deltas" / "folder").mkdir()
    shelf.sweep()
    assert list((tmp_path / "deltas").iterdir()) == [kept]
