"""What was published last, kept so that the next version can be published as the difference to it.

    <root>/<version>/files/          the version's files (links to what the origin has)
    <root>/<version>/manifest.json   its signed manifest
    <root>/<version>/delta           the delta that makes it out of an earlier one, if its manifest has one
    <root>/<version>/packed          its packed form, if its manifest has one

A version is here before anyone hears of it, so that after a crash the same weights go out under the same digest, whether
or not its base is still at hand.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from protocol.disk import sync
from protocol.errors import RollswarmError
from protocol.manifest import Manifest, envelope_from_json, envelope_to_json
from protocol.signing import SignedEnvelope


@dataclass(frozen=True, slots=True)
class Published:
    """One version that is kept."""

    folder: Path
    manifest: Manifest

    @property
    def files(self) -> Path:
        return self.folder / "files"

    @property
    def delta(self) -> Path | None:
        """Where its delta lies, if it has one."""
        return None if self.manifest.delta is None else self.folder / "delta"

    @property
    def packed(self) -> Path | None:
        """Where its packed form lies, if it has one."""
        return None if self.manifest.packed is None else self.folder / "packed"

    @property
    def whole(self) -> bool:
        """Whether everything that its manifest names is here."""
        blobs = [path for path in (self.delta, self.packed) if path is not None]
        return self.files.is_dir() and all(path.is_file() for path in blobs)


class PublishedVersions:
    """Versions below `root`, written by this process or one before it. Methods block on the disk."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def versions(self) -> list[int]:
        """Their numbers, ascending."""
        if not self._root.is_dir():
            return []
        return sorted(int(path.name) for path in self._root.iterdir() if path.name.isdigit())

    def find(self, version: int) -> Published | None:
        """A version, or None if it isn't here or was damaged."""
        folder = self._root / str(version)
        try:
            envelope = envelope_from_json((folder / "manifest.json").read_bytes())
            manifest = Manifest.from_json_bytes(envelope.payload)
        except (OSError, RollswarmError):
            return None
        found = Published(folder, manifest)
        return found if found.whole and manifest.policy_version == version else None

    def keep(self, scratch: Path, envelope: SignedEnvelope, manifest: Manifest) -> Published:
        """Take a folder that holds `files`, maybe `delta` and `packed`, by rename, in place of what has the number."""
        target = self._root / str(manifest.policy_version)
        (scratch / "manifest.json").write_bytes(envelope_to_json(envelope))
        for path in (*(scratch / "files").rglob("*"), scratch / "files", scratch / "manifest.json", scratch):
            sync(path)
        for name, section in (("delta", manifest.delta), ("packed", manifest.packed)):
            if section is not None:
                sync(scratch / name)
        self._root.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(target)
        scratch.rename(target)
        sync(self._root)
        return Published(target, manifest)

    def prune(self, newest: int) -> None:
        """Remove all but `newest`, the next one's base, and the one before it, which was `newest`'s."""
        kept = {newest, max((each for each in self.versions if each < newest), default=newest)}
        for version in set(self.versions) - kept:
            shutil.rmtree(self._root / str(version), ignore_errors=True)


def delta_base(version: int, full_every: int, kept: list[int]) -> int | None:
    """The version that `version` is published as the difference to; None if it goes out in full only.

    >>> delta_base(7, 10, [5, 6]), delta_base(10, 10, [8, 9]), delta_base(3, 10, []), delta_base(3, 10, [3, 4])
    (6, None, None, None)
    """
    earlier = [each for each in kept if each < version]
    return max(earlier) if earlier and version % full_every else None
