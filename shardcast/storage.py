"""Versions on disk, the same layout for origin, relay and client.

    <root>/versions/<version>-<digest prefix>/     the files of a complete version, and nothing else
    <root>/manifests/<version>-<digest prefix>.json  its signed manifest, as it came; `.boot` if not flushed yet,
                                                   `.torrent` its torrent, if clients may swap it
    <root>/deltas/<version>-<digest prefix>        the delta that makes it out of an earlier one, if kept (`blobs`)
    <root>/packed/<version>-<digest prefix>/packed  the version in its packed form, if kept
    <root>/partial/<version>-<digest prefix>/      a version being filled, with <name>.journal beside it; what is
                                                   received for it besides is <name>.….delta/ or <name>.packed/
    <root>/incoming/<version>/                     where the trainer puts files for an origin on its machine; their
                                                   delta is <version>.delta, their packed form <version>.packed
    <root>/names                                   which digest each number names, for ever
    <root>/keys                                    rotations of the trainer's key, for ever
    <root>/locks/                                  advisory locks between processes

A version becomes visible by one rename, after its bytes are verified and durable. It goes away by a rename into
`trash/`, so no reader ever sees half of it; files that are open stay readable.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from protocol.disk import sync
from protocol.errors import BadSignature, RollswarmError, UserError
from protocol.manifest import Digest, Manifest, SignedEnvelope, manifest_digest
from shardcast import locks
from shardcast.blob_manifest import PACKED_FILE
from shardcast.blobs import BlobShelf, ShardLocation
from shardcast.collectable import collectable
from shardcast.data_dir import make_folders
from shardcast.envelope_shelf import EnvelopeShelf
from shardcast.keys import KeyChain
from shardcast.layout import (
    check_folder,
    incoming_delta,
    incoming_folder,
    incoming_packed,
    incoming_torrent,
    owner_of,
    version_name,
    version_of,
)
from shardcast.names import VersionNames
from shardcast.partial import PartialVersion, disk_errors, journal_path, sync_files
from shardcast.torrent_shelf import TorrentShelf
from shardcast.unflushed import Unflushed

log = logging.getLogger("shardcast")


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A complete version on disk."""

    manifest: Manifest
    digest: Digest
    envelope: SignedEnvelope
    path: Path

    @property
    def version(self) -> int:
        return self.manifest.policy_version


class VersionStore:
    """The versions under one root. Index look-ups are instant; methods that say so block on the disk.

    Only versions signed by a pinned key, or one that it was rotated to, exist here; a changed set of keys at the next
    start hides the others.
    With `durable` a version is flushed to the disk before it becomes visible. Without (caches, which can fetch again)
    that second of writing is saved, and a version that was not flushed is hashed again after a restart of the
    machine. `kill -9` loses nothing either way.
    """

    def __init__(self, root: Path, pinned_keys: Collection[str], *, durable: bool = True) -> None:
        self.root = root
        self._versions: dict[int, StoredVersion] = {}
        self._shards: dict[Digest, tuple[int, int]] = {}
        self._reading: dict[int, int] = {}
        self._index_lock = threading.RLock()  # blocking methods run in threads; held for index work only
        with disk_errors(root.parent if root.parent.exists() else Path("/")):
            make_folders(root)
        for left_over in (root / "trash").iterdir():
            shutil.rmtree(left_over, ignore_errors=True)
        self.blobs = BlobShelf(root / "deltas")
        self.packed = BlobShelf(root / "packed", PACKED_FILE)
        self.names = VersionNames(root / "names")
        self.keys = KeyChain(root / "keys", pinned_keys)
        self.torrents = TorrentShelf(root / "manifests")
        self._envelopes = EnvelopeShelf(root / "manifests")
        self._unflushed = Unflushed(root / "manifests", durable=durable)
        self.refresh()
        for shelf in (self.blobs, self.packed):
            shelf.sweep(self._is_staged)

    # What is here

    def get(self, version: int) -> StoredVersion | None:
        """The complete version with this number, if it is here."""
        return self._versions.get(version)

    @property
    def head(self) -> StoredVersion | None:
        """The complete version with the highest number."""
        with self._index_lock:
            return self._versions[max(self._versions)] if self._versions else None

    @property
    def versions(self) -> list[int]:
        """The numbers of the complete versions, ascending."""
        with self._index_lock:
            return sorted(self._versions)

    def complete(self) -> dict[int, StoredVersion]:
        """The complete versions by number."""
        with self._index_lock:
            return dict(self._versions)

    @property
    def sizes(self) -> dict[int, int]:
        """Bytes of each complete version, its blobs included."""
        with self._index_lock:
            return {version: stored.manifest.kept_bytes for version, stored in self._versions.items()}

    def locate(self, digest: Digest) -> ShardLocation | None:
        """Where a complete version, or a blob that is kept of it, holds the bytes with this digest."""
        with self._index_lock:
            found = self._shards.get(digest)
            if found is None:
                return self.blobs.locate(digest) or self.packed.locate(digest)
            version, index = found
            stored = self._versions[version]
        shard = stored.manifest.shards[index]
        path = stored.path / stored.manifest.files[shard.file].path
        return ShardLocation(version, path, shard.offset, shard.size)

    def holds(self, total: Digest) -> bool:
        """Whether a complete version, or a blob that is kept of it, has this total digest."""
        with self._index_lock:
            return (
                self.blobs.holds(total)
                or self.packed.holds(total)
                or any(stored.manifest.total_digest == total for stored in self._versions.values())
            )

    def lacks_packed(self, total: Digest) -> StoredVersion | None:
        """The complete version whose packed form has this total digest and is not here."""
        with self._index_lock:
            if self.packed.holds(total):
                return None
            named = (each for each in self._versions.values() if each.manifest.packed is not None)
            return next((each for each in named if each.manifest.packed and each.manifest.packed.digest == total), None)

    def keep_packed(self, version: int, blob: Path) -> None:
        """Keep the packed form of a complete version, whose bytes were verified. Blocking.

        Where links are to be had, `blob` stays: there is no moment at which who is sent it finds it nowhere.
        """
        stored = self.get(version)
        if stored is None or stored.manifest.packed is None:
            return
        linked = blob.with_name(f"{blob.name}.whole")
        with contextlib.suppress(OSError):
            linked.unlink(missing_ok=True)
            linked.hardlink_to(blob)
        self.packed.adopt(linked if linked.exists() else blob, stored.manifest.packed, stored.path.name)
        with self._index_lock:
            if version in self._versions:
                self.packed.add(version, stored.manifest.packed, stored.path.name)

    @contextlib.contextmanager
    def reading(self, version: int) -> Iterator[None]:
        """Keep a version from collection while a client reads it."""
        self._reading[version] = self._reading.get(version, 0) + 1
        try:
            yield
        finally:
            self._reading[version] -= 1
            if not self._reading[version]:
                del self._reading[version]

    @property
    def being_read(self) -> frozenset[int]:
        """The versions that someone reads now."""
        return frozenset(self._reading)

    # How versions come

    def check_name(self, version: int, digest: Digest) -> None:
        """Raise VersionConflict if the number already names another digest."""
        self.names.check(version, digest)

    def open_partial(self, envelope: SignedEnvelope, manifest: Manifest) -> PartialVersion:
        """Begin or resume filling a version. Blocking. Raises VersionConflict, DiskFullError."""
        digest = manifest_digest(envelope.payload)
        self.check_name(manifest.policy_version, digest)
        name = version_name(manifest.policy_version, digest)
        self._envelopes.save(name, envelope)
        partial = PartialVersion(self.root / "partial" / name, envelope, manifest, digest)
        partial.open()
        return partial

    def finish(self, partial: PartialVersion) -> StoredVersion:
        """Make a filled version durable and visible. Blocking. Raises VersionConflict, DiskFullError."""
        partial.seal(durable=not self._unflushed.defers)
        self._unflushed.mark(partial.folder.name)
        stored = self._install(partial.folder, partial.envelope, partial.manifest, partial.digest)
        journal_path(partial.folder).unlink(missing_ok=True)
        return stored

    def adopt(self, folder: Path, envelope: SignedEnvelope, manifest: Manifest) -> StoredVersion:
        """Make a folder that lies on this disk a version, by rename. Blocking.

        The caller vouches for the bytes (the trainer hashed them when it signed); sizes and the exact set of files
        are checked, and its blobs'. Raises UserError, VersionConflict, DiskFullError.
        """
        digest = manifest_digest(envelope.payload)
        self.check_name(manifest.policy_version, digest)
        check_folder(folder, manifest)
        name = version_name(manifest.policy_version, digest)
        with disk_errors(self.root):
            sync_files(folder, manifest)
            if manifest.delta is not None:
                self.blobs.adopt(incoming_delta(self.root, manifest.policy_version), manifest.delta, name)
            if manifest.packed is not None:
                self.packed.adopt(incoming_packed(self.root, manifest.policy_version), manifest.packed, name)
            self._envelopes.save(name, envelope)
            self.torrents.adopt(incoming_torrent(self.root, manifest.policy_version), manifest, digest)
        return self._install(folder, envelope, manifest, digest)

    def forget_incoming(self, version: int) -> None:
        """Remove what the trainer put there for a version. Blocking."""
        incoming_delta(self.root, version).unlink(missing_ok=True)
        incoming_packed(self.root, version).unlink(missing_ok=True)
        shutil.rmtree(incoming_folder(self.root, version), ignore_errors=True)
        incoming_torrent(self.root, version).unlink(missing_ok=True)

    def refresh(self) -> None:
        """Take in what is on disk: at the start, and after another process may have added versions. Blocking."""
        self.names.refresh()
        self.keys.refresh()
        self._drop_distrusted()
        for path in sorted((self.root / "versions").iterdir()):
            version = version_of(path.name)
            if version is not None and version not in self._versions:
                self._load(path)
        for version in self.versions:
            stored = self.get(version)
            if stored is not None and not stored.path.is_dir():  # another process removed it
                self._drop_index(version)

    def extend_keys(self, statements: Iterable[SignedEnvelope]) -> int:
        """Follow rotations of the trainer's key; how many were news. Blocking.

        What a key signed above the version at which it was rotated away is no version any more.
        """
        added = self.keys.extend(statements)
        if added:
            self._drop_distrusted()
        return added

    @contextlib.asynccontextmanager
    async def lock(self, version: int, digest: Digest) -> AsyncIterator[None]:
        """One process, and one task in it, fills a version at a time. The kernel frees it after `kill -9`."""
        async with locks.held(self.root / "locks" / version_name(version, digest)):
            yield

    # How versions go

    def collect(self, *, required: Collection[int], keep_last: int, recent: Collection[int] = ()) -> list[int]:
        """Remove what nobody needs; see `collectable`. Blocking. Returns the removed numbers."""
        gone = collectable(self.versions, reading=self.being_read, required={*required, *recent}, keep_last=keep_last)
        self.remove(gone)
        self.remove_stale_partials()
        return gone

    def remove(self, versions: Iterable[int]) -> None:
        """Take these versions away at once, whoever reads them. Their numbers stay used. Blocking."""
        for version in versions:
            stored = self._versions.get(version)
            if stored is None:
                continue
            self._drop_index(version)
            self._trash(stored.path)
            self._envelopes.remove(stored.path.name)
            self._unflushed.forget(stored.path.name)
            self.torrents.remove(version, stored.digest)
            log.info("removed version %d", version, extra={"action": "collect", "version": version})

    def demote(self, version: int, bad: Collection[int]) -> bool:
        """Take a version back among those that are being received, without the shards that are wrong on disk. Blocking.

        Who reads it can go on; its number stays bound. `open_partial` hashes the rest again. False if it isn't here any more.
        """
        with self._index_lock:
            stored = self._versions.get(version)
            if stored is None:
                return False
            self._drop_index(version)
        folder = self.root / "partial" / stored.path.name
        right = (index for index in range(len(stored.manifest.shards)) if index not in set(bad))
        journal_path(folder).write_text("".join(f"{index}\n" for index in right), "ascii")
        stored.path.rename(folder)
        return True

    def remove_stale_partials(self) -> None:
        """Remove half-filled versions older than the head, if no process fills them. Blocking."""
        head = max(self.versions, default=-1)
        for folder in (self.root / "partial").iterdir():
            version = version_of(owner_of(folder.name))
            if not folder.is_dir() or version is None or version >= head:
                continue
            with locks.tried(self.root / "locks" / owner_of(folder.name)) as idle:
                if idle:
                    self._trash(folder)
                    journal_path(folder).unlink(missing_ok=True)

    # Internals

    def _is_staged(self, name: str) -> bool:
        """Whether the trainer put this version there: an origin that ended while it took it has only the delta yet."""
        version = version_of(name)
        return version is not None and incoming_folder(self.root, version).exists()

    def _drop_distrusted(self) -> None:
        for version in self.versions:
            stored = self._versions[version]
            try:
                self.keys.ring.check(stored.envelope.key_id, stored.manifest.run_id, version)
            except BadSignature as error:
                log.warning("leaving out %s: %s", stored.path, error, extra={"action": "distrust", "version": version})
                self._drop_index(version)

    def _install(self, folder: Path, envelope: SignedEnvelope, manifest: Manifest, digest: Digest) -> StoredVersion:
        target = self.root / "versions" / version_name(manifest.policy_version, digest)
        with disk_errors(self.root):
            # Rename before the name is recorded: a crash between leaves a version that the next start records.
            # The other order would leave a number that is used and can never be served.
            if manifest.policy_version not in self._versions and target.exists():
                self._trash(target)  # `_load` found it damaged
            if not target.exists():
                folder.rename(target)
                sync(target.parent)
            self.names.record(manifest.policy_version, digest)
        stored = StoredVersion(manifest, digest, envelope, target)
        self._add_index(stored)
        return stored

    def _load(self, path: Path) -> None:
        try:
            envelope = self._envelopes.read(path.name)
            manifest = self.keys.open_manifest(envelope)
            digest = manifest_digest(envelope.payload)
            if path.name != version_name(manifest.policy_version, digest):
                raise UserError("its manifest belongs to another version")
            check_folder(path, manifest)
            if not self._unflushed.check(path, manifest):
                self._trash(path)
                raise UserError("bytes were lost when the machine went down; it will be fetched again")
            self.names.record(manifest.policy_version, digest)
        except (RollswarmError, OSError) as error:
            log.warning("leaving out %s: %s", path, error, extra={"action": "load", "path": str(path)})
            return
        self._add_index(StoredVersion(manifest, digest, envelope, path))

    def _add_index(self, stored: StoredVersion) -> None:
        with self._index_lock:
            self._versions[stored.version] = stored
            for index, shard in enumerate(stored.manifest.shards):
                self._shards.setdefault(shard.digest, (stored.version, index))
            self.blobs.add(stored.version, stored.manifest.delta, stored.path.name)
            self.packed.add(stored.version, stored.manifest.packed, stored.path.name)

    def _drop_index(self, version: int) -> None:
        with self._index_lock:
            stored = self._versions.pop(version)
            self.blobs.remove(version)
            self.packed.remove(version)
            lost = {shard.digest for shard in stored.manifest.shards if self._shards[shard.digest][0] == version}
            for digest in lost:
                del self._shards[digest]
            for other in self._versions.values():  # shards that another version holds as well
                for index, shard in enumerate(other.manifest.shards):
                    if shard.digest in lost:
                        self._shards.setdefault(shard.digest, (other.version, index))

    def _trash(self, path: Path) -> None:
        bin_ = Path(tempfile.mkdtemp(dir=self.root / "trash"))
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            path.rename(bin_ / path.name)
        shutil.rmtree(bin_, ignore_errors=True)
