"""Which versions of a client were not flushed to disk yet: a power cut may have cost them bytes."""

from __future__ import annotations

from pathlib import Path

from protocol.manifest import Manifest
from shardcast.partial import boot_id, hash_range, sync_files


class Unflushed:
    """Files `<version>-<digest prefix>.boot` in one folder: which start of the machine wrote the version. Blocking.

    `durable`: everything is flushed before it is visible, and nothing is marked; so it is, too, where starts have no names.
    """

    def __init__(self, folder: Path, *, durable: bool) -> None:
        self._folder = folder
        self._boot = None if durable else boot_id()

    @property
    def defers(self) -> bool:
        """Whether versions become visible before they are flushed."""
        return self._boot is not None

    def mark(self, name: str) -> None:
        """The version is about to be visible, unflushed."""
        if self._boot is not None:
            self._path(name).write_text(self._boot)

    def forget(self, name: str) -> None:
        """The version is gone, or durable."""
        self._path(name).unlink(missing_ok=True)

    def check(self, path: Path, manifest: Manifest) -> bool:
        """Hash a version again if the machine went down before it was flushed; False if bytes were lost.

        What is right is made durable then.
        """
        marker = self._path(path.name)
        if not marker.exists() or marker.read_text("ascii", "replace") == boot_id():
            return True
        for shard in manifest.shards:
            if hash_range(path / manifest.files[shard.file].path, shard.offset, shard.size) != shard.digest:
                return False
        sync_files(path, manifest)
        self.forget(path.name)
        return True

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.boot"
