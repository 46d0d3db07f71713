"""Which digest each version number names, for ever: an append-only file that outlives the versions themselves."""

from __future__ import annotations

import os
from pathlib import Path

from protocol.errors import SourceFault
from protocol.manifest import Digest, InvalidManifest


class VersionConflict(SourceFault):
    """A version number was offered with another digest than the one it names."""


class VersionNames:
    """`version digest` lines. Appended durably before a version is announced or used; never rewritten.

    Several processes may append to one file: every line is written at once with O_APPEND. A line torn by a power
    cut names nothing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digests: dict[int, Digest] = {}
        self._read_to = 0
        self.refresh()

    def get(self, version: int) -> Digest | None:
        """The digest that this number names, or None while it is free."""
        return self._digests.get(version)

    @property
    def latest(self) -> int | None:
        """The highest number ever used, also if its files are gone."""
        return max(self._digests, default=None)

    def check(self, version: int, digest: Digest) -> None:
        """Raise VersionConflict if the number names another digest."""
        known = self._digests.get(version)
        if known is not None and known != digest:
            raise VersionConflict(
                f"version {version} names {known} for ever and is now offered as {digest}: "
                "refused; publish under the next number"
            )

    def record(self, version: int, digest: Digest) -> None:
        """Bind the number to the digest, durably. Raises VersionConflict."""
        self.refresh()
        self.check(version, digest)
        if version in self._digests:
            return
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, f"\n{version} {digest}\n".encode())  # the first newline ends a torn line
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._digests[version] = digest

    def refresh(self) -> None:
        """Read what other processes appended."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_to)
                added = file.read()
        except FileNotFoundError:
            return
        whole = added[: added.rfind(b"\n") + 1]
        self._read_to += len(whole)
        for line in whole.decode("ascii", "replace").splitlines():
            self._read_line(line)

    def _read_line(self, line: str) -> None:
        number, _, digest = line.partition(" ")
        if not number.isascii() or not number.isdigit():
            return
        try:
            self._digests.setdefault(int(number), Digest(digest))
        except InvalidManifest:
            return
