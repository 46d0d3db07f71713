"""The deltas that a server keeps beside its versions, to pass them on; they come and go with the version.

Invariant: only the delta of a complete version is offered, and only with the size that its manifest says. Its bytes were
verified when they came (or hashed by the trainer that signed them). A version whose delta is gone is still served in full.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from protocol.delta import DeltaSection
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
    """One folder of blobs. The index is the caller's to guard; methods that say so block on the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: dict[int, tuple[Path, DeltaSection]] = {}
        self._shards: dict[Digest, list[ShardLocation]] = {}  # versions that changed nothing have equal blobs

    def adopt(self, blob: Path, delta: DeltaSection, name: str) -> None:
        """Take a blob whose bytes somebody vouches for, by rename, durably. Blocking.

        Raises UserError if it isn't there at its size. What was taken already, before a crash, is fine.
        """
        target = self._folder / name
        found = blob if blob.exists() or not target.exists() else target
        size = found.stat().st_size if found.is_file() and not found.is_symlink() else None
        if size != delta.size:
            there = "it is absent" if size is None else f"it has {size}"
            raise UserError(f"{blob} should have {delta.size} bytes; {there}")
        sync(found)
        found.replace(target)
        sync(self._folder)

    def add(self, version: int, delta: DeltaSection | None, name: str) -> None:
        """Offer the blob of a version that became complete, if it is here. Blocking."""
        path = self._folder / name
        if delta is None or not path.is_file() or path.stat().st_size != delta.size:
            return
        self._kept[version] = (path, delta)
        for shard in delta.shards:
            place = ShardLocation(version, path, shard.offset, shard.size)
            self._shards.setdefault(shard.digest, []).append(place)

    def remove(self, version: int) -> None:
        """Take a version's blob away; who reads it can go on. Blocking."""
        path, delta = self._kept.pop(version, (None, None))
        if path is None or delta is None:
            return
        for shard in delta.shards:
            places = [place for place in self._shards.pop(shard.digest, []) if place.version != version]
            if places:
                self._shards[shard.digest] = places
        path.unlink(missing_ok=True)

    def sweep(self, spared: Callable[[str], bool] = lambda name: False) -> None:
        """Remove what belongs to no complete version: a crash left it. `spared`: names of versions about to be. Blocking."""
        kept = {path for path, _ in self._kept.values()}
        for path in self._folder.iterdir():
            if path not in kept and not spared(path.name):
                path.unlink(missing_ok=True) if not path.is_dir() else shutil.rmtree(path, ignore_errors=True)

    def locate(self, digest: Digest) -> ShardLocation | None:
        """Where the shard of a blob lies."""
        places = self._shards.get(digest)
        return places[0] if places else None

    def holds(self, total: Digest) -> bool:
        """Whether the blob with this digest is here."""
        return any(delta.digest == total for _, delta in self._kept.values())
