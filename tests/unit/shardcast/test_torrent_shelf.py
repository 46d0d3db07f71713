"""shardcast.torrent_shelf: torrents beside their manifests."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.manifest import Digest, manifest_digest
from shardcast.publish import describe
from shardcast.torrent_shelf import TorrentShelf

KIB = 2**10


@pytest.fixture
def shelf(tmp_path: Path) -> TorrentShelf:
    folder = tmp_path / "shelf"
    folder.mkdir()
    return TorrentShelf(folder)


def test_what_was_put_is_got_until_it_is_removed(shelf: TorrentShelf) -> None:
    digest = Digest.of(b"x")
    assert shelf.get(1, digest) is None
    shelf.put(1, digest, b"torrent")
    shelf.put(1, digest, b"again")
    assert shelf.get(1, digest) == b"again" and shelf.get(2, digest) is None
    shelf.remove(1, digest)
    shelf.remove(1, digest)
    assert shelf.get(1, digest) is None


def test_only_the_torrent_that_the_manifest_names_is_adopted(shelf: TorrentShelf, tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.mkdir()
    (version / "weights").write_bytes(bytes(100 * KIB))
    described = describe(version, run_id="run", policy_version=1, shard_bytes=64 * KIB)
    assert described.torrent is not None
    digest = manifest_digest(described.manifest.to_json_bytes())
    left = tmp_path / "1.torrent"
    shelf.adopt(left, described.manifest, digest)
    assert shelf.get(1, digest) is None
    left.write_bytes(described.torrent[:-1])
    shelf.adopt(left, described.manifest, digest)
    assert shelf.get(1, digest) is None and not left.exists()
    left.write_bytes(described.torrent)
    shelf.adopt(left, described.manifest, digest)
    assert shelf.get(1, digest) == described.torrent and not left.exists()
