"""Which digest each version number names, for ever: an append-only file that outlives the versions themselves."""

from __future__ import annotations

from pathlib import Path

from protocol.errors import SourceFault
from protocol.manifest import Digest, InvalidManifest
from shardcast.lines import AppendOnlyLines


class VersionConflict(SourceFault):
    """A version number was offered with another digest than the one it names."""


class VersionNames:
    """`version digest` lines. Appended durably before a version is announced or used; never rewritten."""

    def __init__(self, path: Path) -> None:
        self._lines = AppendOnlyLines(path)
        self._digests: dict[int, Digest] = {}
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
        self._lines.append(f"{version} {digest}")
        self._digests[version] = digest

    def refresh(self) -> None:
        """Read what other processes appended."""
        for line in self._lines.read_new():
            self._read_line(line)

    def _read_line(self, line: str) -> None:
        number, _, digest = line.partition(" ")
        if not number.isascii() or not number.isdigit():
            return
        try:
            self._digests.setdefault(int(number), Digest(digest))
        except InvalidManifest:
            return
