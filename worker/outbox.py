"""Signed rollouts on disk until their receipts are here: nothing finished is lost to a crash or to days offline.

One file per rollout, named by its id, written to a temporary name, synced and renamed, and the folder synced: a file is whole
or absent, and what is kept stays kept.
"""

from __future__ import annotations

import os
from pathlib import Path

from google.protobuf.message import DecodeError

from protocol.disk import sync
from protocol.errors import BadSignature, UserError
from protocol.signing import ROLLOUT, SignedEnvelope, open_envelope
from protocol.wire import envelope_from_wire, envelope_to_wire, rollout_id
from protos.rollswarm.v1 import common_pb2

_SUFFIX = ".rollout"


class Outbox:
    """A folder of envelopes that wait for their receipts. One process uses it."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError if the folder can't be made."""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise UserError(f"cannot make the outbox {folder}: {error.strerror}") from error
        self._folder = folder
        for leftover in folder.glob("*.tmp"):
            leftover.unlink(missing_ok=True)

    def put(self, envelope: SignedEnvelope) -> str:
        """Keep an envelope; its rollout id. Raises OSError if the disk refuses (the caller says so and retries)."""
        identifier = rollout_id(envelope.payload)
        path = self._path(identifier)
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            file.write(envelope_to_wire(envelope).SerializeToString())
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        sync(self._folder)
        return identifier

    def waiting(self) -> list[str]:
        """Ids of what waits, oldest first."""
        files = sorted(self._folder.glob("*" + _SUFFIX), key=lambda path: (path.stat().st_mtime_ns, path.name))
        return [f"sha256:{path.stem}" for path in files]

    def get(self, identifier: str) -> SignedEnvelope | None:
        """The envelope, None if it is damaged (it is then set aside, for a person to look at)."""
        path = self._path(identifier)
        message = common_pb2.SignedEnvelope()
        try:
            message.ParseFromString(path.read_bytes())
        except DecodeError:
            path.rename(path.with_suffix(".damaged"))
            return None
        envelope = envelope_from_wire(message)
        try:
            intact = rollout_id(open_envelope(envelope, ROLLOUT)) == identifier
        except BadSignature:
            intact = False
        if not intact:
            path.rename(path.with_suffix(".damaged"))
            return None
        return envelope

    def remove(self, identifier: str) -> None:
        """Its receipt is here, or it was refused for good."""
        self._path(identifier).unlink(missing_ok=True)

    def _path(self, identifier: str) -> Path:
        return self._folder / (identifier.removeprefix("sha256:") + _SUFFIX)
