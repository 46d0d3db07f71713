"""The signed manifests of versions, as they came. Whoever reads one checks it again."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from protocol.disk import sync
from protocol.manifest import SignedEnvelope, envelope_from_json, envelope_to_json
from shardcast.partial import disk_errors


class EnvelopeShelf:
    """Files `<version>-<digest prefix>.json` in one folder. Blocking."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> SignedEnvelope:
        """Raises OSError if it isn't here, InvalidManifest."""
        return envelope_from_json(self._path(name).read_bytes())

    def save(self, name: str, envelope: SignedEnvelope) -> None:
        """Durably, and whole or not at all. Raises DiskFullError."""
        with disk_errors(self._folder):
            handle, temporary = tempfile.mkstemp(dir=self._folder, prefix=".", suffix=".tmp")
            with os.fdopen(handle, "wb") as file:
                file.write(envelope_to_json(envelope))
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(self._path(name))
            sync(self._folder)

    def remove(self, name: str) -> None:
        """The version is gone."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"
