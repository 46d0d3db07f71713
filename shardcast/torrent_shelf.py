"""The torrents of versions, beside their manifests. Only checked ones are put here; whoever lost one does without."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from pathlib import Path

from protocol.manifest import Digest, Manifest
from shardcast.blob_manifest import swapped
from shardcast.layout import version_name
from shardcast.partial import disk_errors
from shardcast.torrent import InvalidTorrent, Layout

log = logging.getLogger("shardcast")


class TorrentShelf:
    """Files `<version>-<digest prefix>.torrent` in one folder. Blocking."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, version: int, digest: Digest) -> bytes | None:
        """A version's torrent, if it is here."""
        with contextlib.suppress(FileNotFoundError):
            return self._path(version, digest).read_bytes()
        return None

    def put(self, version: int, digest: Digest, torrent: bytes) -> None:
        """Keep a torrent that passed `Layout.check`. Raises DiskFullError."""
        with disk_errors(self._folder):
            handle, temporary = tempfile.mkstemp(dir=self._folder, prefix=".", suffix=".tmp")
            with os.fdopen(handle, "wb") as file:
                file.write(torrent)
            Path(temporary).replace(self._path(version, digest))

    def adopt(self, file: Path, manifest: Manifest, digest: Digest) -> None:
        """Take a torrent that the trainer left for a version; without the right one the version does without."""
        layout = Layout.of(swapped(manifest))
        if layout is None or manifest.torrent_info_hash is None or not file.exists():
            return
        try:
            torrent = file.read_bytes()
            layout.check(torrent, manifest.torrent_info_hash)
        except (OSError, InvalidTorrent) as error:
            log.warning("no peers for version %d: %s", manifest.policy_version, error, extra={"action": "torrent"})
        else:
            self.put(manifest.policy_version, digest, torrent)
        file.unlink(missing_ok=True)

    def remove(self, version: int, digest: Digest) -> None:
        """The version is gone."""
        self._path(version, digest).unlink(missing_ok=True)

    def _path(self, version: int, digest: Digest) -> Path:
        return self._folder / f"{version_name(version, digest)}.torrent"
