"""A version that is being filled: files at their full size, and a journal of the shards that were verified.

Invariant: a shard is in `have` only if its bytes on disk had the manifest's digest in this process. The journal only
says which shards are worth hashing again after a restart, so neither `kill -9` nor a power cut can pass off bytes
that were not checked.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from protocol.disk import sync
from protocol.errors import UserError
from protocol.manifest import Digest, Manifest, SignedEnvelope, tree_digest

_READ_BYTES = 2**20
_CACHED_BYTES = 2**18  # hashed and then written: the second time they come from the processor's cache


class DiskFullError(UserError):
    """There is no room for a version. Nothing half-written is visible."""


@contextlib.contextmanager
def disk_errors(folder: Path, what: str = "") -> Iterator[None]:
    """Turn "no space left" into DiskFullError with the folder, `what` was to be written, and the way out."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(folder).free // 2**20
        taking = f" and can't take {what}" if what else ""
        raise DiskFullError(
            f"the disk of {folder} is full ({free} MiB free){taking}: make room or keep fewer versions"
        ) from error


class ShardWriter:
    """Writes one shard into its file and hashes it on the way, once. `received` bytes are on disk and hashed."""

    def __init__(self, descriptor: int, folder: Path, offset: int, size: int) -> None:
        self.size = size
        self.received = 0
        self._offset = offset
        self._folder = folder
        self._hash = hashlib.sha256()
        self._descriptor = descriptor

    @classmethod
    def into(cls, path: Path, offset: int, size: int) -> ShardWriter:
        """Write where the shard belongs."""
        return cls(os.open(path, os.O_WRONLY), path.parent, offset, size)

    @classmethod
    def scratch(cls, folder: Path, size: int) -> ShardWriter:
        """Write into a file without a name: it can't be seen, and is gone with the process."""
        with disk_errors(folder):
            descriptor, name = tempfile.mkstemp(dir=folder, prefix=".", suffix=".scratch")
            Path(name).unlink()
        return cls(descriptor, folder, 0, size)

    def copy_to(self, other: ShardWriter) -> None:
        """Write what is here into another writer, which hashes it again. Blocking."""
        at = self._offset
        end = at + self.received
        while at < end and (chunk := os.pread(self._descriptor, min(end - at, _READ_BYTES), at)):
            other.write([chunk])
            at += len(chunk)

    def write(self, chunks: Sequence[bytes | memoryview]) -> None:
        """Append the chunks. Raises DiskFullError. Blocking: call it from a thread."""
        with disk_errors(self._folder):
            for chunk in chunks:
                assert self.received + len(chunk) <= self.size, "a shard can't be overrun"
                whole = memoryview(chunk)
                for begin in range(0, len(whole), _CACHED_BYTES):
                    part = whole[begin : begin + _CACHED_BYTES]
                    self._hash.update(part)
                    self._write_all(part)
                    self.received += len(part)

    def restart(self) -> None:
        """Forget what was received."""
        self.received = 0
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> Digest:
        """The digest of what was received so far."""
        return Digest.from_raw(self._hash.digest())

    def _write_all(self, view: memoryview) -> None:
        at = self._offset + self.received
        while view:
            written = os.pwrite(self._descriptor, view, at)
            view = view[written:]
            at += written

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PartialVersion:
    """One version on its way in. The holder has the store's lock for it; shards may be written in parallel."""

    def __init__(self, folder: Path, envelope: SignedEnvelope, manifest: Manifest, digest: Digest) -> None:
        self.folder = folder
        self.envelope = envelope
        self.manifest = manifest
        self.digest = digest
        self.have: dict[int, Digest] = {}
        self._journal_path = journal_path(folder)
        self._journal: int | None = None

    def open(self) -> None:
        """Make the files at full size, or hash again what an earlier process had verified. Blocking.

        Raises DiskFullError.
        """
        size = f"{self.manifest.total_bytes / 2**20:.1f} MiB"
        with disk_errors(self.folder.parent, f"version {self.manifest.policy_version} of {size}"):
            self.folder.mkdir(exist_ok=True)
            for file in self.manifest.files:
                _reserve(self.folder / file.path, file.size)
            self._recheck(self._journalled())
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._journal = os.open(self._journal_path, flags, 0o644)

    @property
    def missing(self) -> list[int]:
        """Indexes of the shards that are not verified yet, ascending."""
        return [index for index in range(len(self.manifest.shards)) if index not in self.have]

    @property
    def done_bytes(self) -> int:
        """Bytes of the verified shards."""
        return sum(self.manifest.shards[index].size for index in self.have)

    def path_of(self, index: int) -> Path:
        """The file that holds a shard."""
        return self.folder / self.manifest.files[self.manifest.shards[index].file].path

    def writer(self, index: int) -> ShardWriter:
        """A writer for one shard."""
        shard = self.manifest.shards[index]
        return ShardWriter.into(self.path_of(index), shard.offset, shard.size)

    def scratch(self, index: int) -> ShardWriter:
        """A writer for a second copy of a shard, which never touches the version's own files."""
        return ShardWriter.scratch(self.folder.parent, self.manifest.shards[index].size)

    def commit(self, index: int, received: Digest) -> bool:
        """Mark a shard as verified if the received digest is the manifest's; says whether it was."""
        if received != self.manifest.shards[index].digest:
            return False
        self.have[index] = received
        assert self._journal is not None, "open() comes first"
        os.write(self._journal, f"{index}\n".encode("ascii"))
        return True

    def seal(self, *, durable: bool) -> None:
        """Check the whole, and make it durable if asked to. Blocking."""
        received = tree_digest(self.have[index] for index in range(len(self.manifest.shards)))
        assert received == self.manifest.total_digest, "verified shards always make the verified whole"
        if durable:
            with disk_errors(self.folder.parent):
                sync_files(self.folder, self.manifest)
        self.close()

    def close(self) -> None:
        """Close the journal; what is on disk stays for the next attempt."""
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None

    def _journalled(self) -> list[int]:
        try:
            lines = self._journal_path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        count = len(self.manifest.shards)
        return sorted({int(line) for line in lines[:-1] if line.isdigit() and int(line) < count})

    def _recheck(self, indexes: Sequence[int]) -> None:
        for index in indexes:
            shard = self.manifest.shards[index]
            digest = hash_range(self.path_of(index), shard.offset, shard.size)
            if digest == shard.digest:
                self.have[index] = digest


def journal_path(folder: Path) -> Path:
    """The journal lies beside a partial version's folder, never inside what becomes its content."""
    return folder.with_name(folder.name + ".journal")


def hash_range(path: Path, offset: int, size: int) -> Digest:
    """SHA-256 of a byte range, read in small pieces. A short file gives a digest that matches nothing."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while size > 0 and (chunk := file.read(min(size, _READ_BYTES))):
            digest.update(chunk)
            size -= len(chunk)
    return Digest.from_raw(digest.digest())


def sync_files(folder: Path, manifest: Manifest) -> None:
    """Make all files of a version durable, and their names."""
    for file in manifest.files:
        sync(folder / file.path)
    for inner in {(folder / file.path).parent for file in manifest.files}:
        sync(inner)


def boot_id() -> str | None:
    """Names this start of the machine: what was written since then can't have been lost to a power cut."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return None


def _reserve(path: Path, size: int) -> None:
    """A file of exactly `size` bytes with its blocks allocated, so that a full disk shows now and not midway."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        if os.fstat(descriptor).st_size != size:
            os.ftruncate(descriptor, 0)
            _allocate(descriptor, size)
    finally:
        os.close(descriptor)


def _allocate(descriptor: int, size: int) -> None:
    if size == 0:
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(descriptor, size)
