"""The trainer's keys as this process knows them: those pinned, and what statements lead to, kept in a file."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable
from pathlib import Path

from protocol.manifest import InvalidManifest, Manifest, SignedEnvelope, envelope_from_json, envelope_to_json
from protocol.rotation import KeyRing, chain_to_json, open_rotation
from protocol.signing import short_id
from shardcast.lines import AppendOnlyLines

log = logging.getLogger("shardcast")


class KeyChain:
    """Grows only, by statements that extend it. Several processes may share the file; it is read again when asked."""

    def __init__(self, path: Path, pinned: Collection[str]) -> None:
        self._lines = AppendOnlyLines(path)
        self._lock = threading.Lock()
        self.ring = KeyRing.of(pinned)
        self.refresh()

    def refresh(self) -> None:
        """Take in what other processes added. Blocking."""
        with self._lock:
            self._read()

    def extend(self, statements: Iterable[SignedEnvelope]) -> int:
        """Keep the statements that extend the chain, durably; how many did. Blocking. The others are logged."""
        with self._lock:
            self._read()
            known = self.ring.statements
            self.ring, faults = self.ring.follow(statements)
            added = self.ring.statements[len(known) :]
            for statement in added:
                self._lines.append(envelope_to_json(statement).decode("ascii"))
                rotation = open_rotation(statement)
                log.warning(
                    "the trainer's key %s… signs no version above %d; %s… does",
                    short_id(rotation.old_key),
                    rotation.after_version,
                    short_id(rotation.new_key),
                    extra={"action": "rotate_key"},
                )
        for fault in faults:
            log.warning("a key rotation is passed over: %s", fault, extra={"action": "rotate_key"})
        return len(added)

    def open_manifest(self, envelope: SignedEnvelope) -> Manifest:
        """A manifest signed by the key that signs its version. Raises BadSignature or InvalidManifest."""
        return self.ring.open_manifest(envelope)

    def to_json(self) -> bytes:
        """All statements, as HTTP carries them."""
        return chain_to_json(self.ring.statements)

    def _read(self) -> None:
        statements = []
        for line in self._lines.read_new():
            try:
                statements.append(envelope_from_json(line.encode("ascii", "replace")))
            except InvalidManifest:
                continue  # torn
        self.ring, _ = self.ring.follow(statements)
