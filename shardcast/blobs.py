"""The blobs that a server keeps beside its versions, to pass them on: deltas, or packed versions; they go with the version.

Invariant: only the blob of a complete version is offered, and only with the size that its manifest says. Its bytes were
verified when they came (or hashed by the trainer that signed them). A version whose blob is gone is still served in full.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from protocol.blob import BlobSection
from protocol.digest import Digest
from protocol.disk import sync
from protocol.errors import UserError


@dataclass(frozen=True, slots=True)
class ShardLocation:
    """Where the bytes of a shard lie, and the version that they belong to."""

    version: int
    path: Path
    offset: int
    size: int


class BlobShelf:
    """One folder of blobs. The index is the caller's to guard; methods that say so block on the disk.

    `file`: their name, each in a folder of its own (libtorrent knows a file by its name in a folder that may move); if not
    given, they are files themselves.
    """

    def __init__(self, folder: Path, file: str = "") -> None:
        self._folder = folder
        self._file = file
        self._kept: dict[int, tuple[Path, BlobSection]] = {}
        self._shards: dict[Digest, list[ShardLocation]] = {}  # versions that changed nothing have equal blobs

    def adopt(self, blob: Path, section: BlobSection, name: str) -> None:
        """Take a blob whose bytes somebody vouches for, by rename, durably. Blocking.

        Raises UserError if it isn't there at its size. What was taken already, before a crash, is fine.
        """
        target = self._path(name)
        found = blob if blob.exists() or not target.exists() else target
        size = found.stat().st_size if found.is_file() and not found.is_symlink() else None
        if size != section.size:
            there = "it is absent" if size is None else f"it has {size}"
            raise UserError(f"{blob} should have {section.size} bytes; {there}")
        sync(found)
        target.parent.mkdir(exist_ok=True)
        found.replace(target)
        sync(target.parent)
        sync(self._folder)

    def add(self, version: int, section: BlobSection | None, name: str) -> None:
        """Offer the blob of a version that is complete, if it is here. Blocking."""
        path = self._path(name)
        if section is None or version in self._kept or not path.is_file() or path.stat().st_size != section.size:
            return
        self._kept[version] = (path, section)
        for shard in section.shards:
            place = ShardLocation(version, path, shard.offset, shard.size)
            self._shards.setdefault(shard.digest, []).append(place)

    def remove(self, version: int) -> None:
        """Take a version's blob away; who reads it can go on. Blocking."""
        path, section = self._kept.pop(version, (None, None))
        if path is None or section is None:
            return
        for shard in section.shards:
            places = [place for place in self._shards.pop(shard.digest, []) if place.version != version]
            if places:
                self._shards[shard.digest] = places
        self._erase(self._entry(path))

    def sweep(self, spared: Callable[[str], bool] = lambda name: False) -> None:
        """Remove what belongs to no complete version: a crash left it. `spared`: names of versions about to be. Blocking."""
        kept = {self._entry(path) for path, _ in self._kept.values()}
        for path in self._folder.iterdir():
            if path not in kept and not spared(path.name):
                self._erase(path)

    def path(self, version: int) -> Path | None:
        """Where a version's blob lies, if it is here."""
        kept = self._kept.get(version)
        return None if kept is None else kept[0]

    def locate(self, digest: Digest) -> ShardLocation | None:
        """Where the shard of a blob lies."""
        places = self._shards.get(digest)
        return places[0] if places else None

    def holds(self, total: Digest) -> bool:
        """Whether the blob with this digest is here."""
        return any(section.digest == total for _, section in self._kept.values())

    def _path(self, name: str) -> Path:
        return self._folder / name / self._file if self._file else self._folder / name

    def _entry(self, path: Path) -> Path:
        return path.parent if self._file else path

    @staticmethod
    def _erase(path: Path) -> None:
        path.unlink(missing_ok=True) if not path.is_dir() else shutil.rmtree(path, ignore_errors=True)
