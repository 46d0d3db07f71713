"""Rotation of the trainer's key: a statement, signed by the old key, that another key signs from some version on.

Everyone goes on pinning the first key for ever; statements lead from it to the present one. A statement says: versions
above `after_version` are signed by `new_key`, and no longer by the key that signed the statement. So whoever steals a
key that was rotated away can sign nothing above it, to anybody who has seen the statement.

The rules, all checked by `KeyRing.extended`: a statement is signed by a key that the ring holds and that was not
rotated yet (the first of two is kept: no forks), leads to a key that was never part of the chain (no loops), and its
version is not below that from which its own signer signs. A statement counts for its own run alone, so that a key that
serves two runs can be rotated in one without anybody replaying the statement in the other.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from protocol.errors import BadSignature, SourceFault, UserError
from protocol.manifest import (
    MAX_VERSION,
    InvalidManifest,
    Manifest,
    SignedEnvelope,
    envelope_from_json,
    envelope_to_json,
    open_manifest,
)
from protocol.signing import KEY_ROTATION, Identity, open_envelope, public_key, short_id

FORMAT = 1
MAX_ROTATIONS = 64
MAX_STATEMENT_BYTES = 2048
MAX_CHAIN_BYTES = 2 * MAX_ROTATIONS * MAX_STATEMENT_BYTES


class InvalidRotation(SourceFault):
    """A statement, or a chain of them, that breaks the rules of this module."""


@dataclass(frozen=True, slots=True)
class KeyRotation:
    """Versions above `after_version` of the run are signed by `new_key`."""

    run_id: str
    old_key: str
    new_key: str
    after_version: int

    def to_json_bytes(self) -> bytes:
        """The canonical payload. These bytes are signed."""
        body = {
            "format": FORMAT,
            "run_id": self.run_id,
            "old_key": self.old_key,
            "new_key": self.new_key,
            "after_version": self.after_version,
        }
        return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def sign_rotation(run_id: str, old: Identity, new_key: str, after_version: int) -> SignedEnvelope:
    """The statement that the owner of the old key makes. Raises UserError if nobody could follow it."""
    if new_key == old.key_id:
        raise UserError("the new key is the old one: make another")
    if not 0 <= after_version <= MAX_VERSION:
        raise UserError(f"the last version that the old key signs is within 0 and {MAX_VERSION}, not {after_version}")
    return old.sign(KEY_ROTATION, KeyRotation(run_id, old.key_id, new_key, after_version).to_json_bytes())


def open_rotation(envelope: SignedEnvelope) -> KeyRotation:
    """Check a statement by itself: its form, and that the key it rotates signed it. Raises InvalidRotation."""
    if len(envelope.payload) > MAX_STATEMENT_BYTES:
        raise InvalidRotation(f"a key rotation has at most {MAX_STATEMENT_BYTES} bytes, not {len(envelope.payload)}")
    try:
        body = json.loads(open_envelope(envelope, KEY_ROTATION))
        rotation = KeyRotation(body["run_id"], body["old_key"], body["new_key"], body["after_version"])
        canonical = rotation.to_json_bytes() == envelope.payload
        public_key(rotation.new_key)
    except (BadSignature, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidRotation(f"not a key rotation: {error!s:.90}") from None
    version = rotation.after_version
    if not canonical or not isinstance(version, int) or isinstance(version, bool) or not 0 <= version <= MAX_VERSION:
        raise InvalidRotation("not a key rotation in canonical form")
    if rotation.old_key != envelope.key_id:
        raise InvalidRotation("a key rotation is signed by the key that it rotates")
    return rotation


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The keys of a trainer: those pinned, and, per run, those that statements lead to. A value; extended by copying."""

    pinned: frozenset[str]
    statements: tuple[SignedEnvelope, ...] = ()
    _first: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (run, new key) → lowest version it signs
    _last: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (run, old key) → highest version it signs

    @classmethod
    def of(cls, pinned: Collection[str]) -> KeyRing:
        """The ring before any rotation."""
        return cls(frozenset(pinned))

    def extended(self, envelope: SignedEnvelope) -> KeyRing:
        """The ring with one statement more; itself if it has that one. Raises InvalidRotation."""
        if envelope in self.statements:
            return self
        rotation = open_rotation(envelope)
        old, new = (rotation.run_id, rotation.old_key), (rotation.run_id, rotation.new_key)
        if rotation.old_key not in self.pinned and old not in self._first:
            raise InvalidRotation(f"a key rotation by {short_id(rotation.old_key)}…, which no pinned key leads to")
        if old in self._last:
            raise InvalidRotation(f"a second key rotation by {short_id(rotation.old_key)}…: the first one counts")
        if new in self._first or new in self._last or new == old:
            raise InvalidRotation(f"a key rotation back to {short_id(rotation.new_key)}…, which was used before")
        if rotation.after_version < self._first.get(old, 0) - 1:
            raise InvalidRotation("a key rotation from a version on that its own key didn't sign yet")
        if len(self.statements) >= MAX_ROTATIONS:
            raise InvalidRotation(f"more than {MAX_ROTATIONS} key rotations")
        return KeyRing(
            self.pinned,
            (*self.statements, envelope),
            {**self._first, new: rotation.after_version + 1},
            {**self._last, old: rotation.after_version},
        )

    def follow(self, envelopes: Iterable[SignedEnvelope]) -> tuple[KeyRing, list[InvalidRotation]]:
        """The ring with all the statements that extend it, and what is wrong with the others."""
        ring, faults = self, []
        for envelope in envelopes:
            try:
                ring = ring.extended(envelope)
            except InvalidRotation as fault:
                faults.append(fault)
        return ring, faults

    def check(self, key_id: str, run_id: str, version: int) -> None:
        """Raise BadSignature unless the key signs this version of the run."""
        first = self._first.get((run_id, key_id))
        if key_id not in self.pinned and first is None:
            raise BadSignature(
                f"signed by {key_id[:24]}…, which is not a key this run pins: is it another run's, or --trainer-key mistyped?"
            )
        last = self._last.get((run_id, key_id))
        if last is not None and version > last:
            raise BadSignature(f"signed by {key_id[:24]}…, which was rotated away after version {last}")
        if key_id not in self.pinned and first is not None and version < first:
            raise BadSignature(f"signed by {key_id[:24]}…, which signs from version {first} on")

    def open_manifest(self, envelope: SignedEnvelope) -> Manifest:
        """A manifest signed by the key that signs its version. Raises BadSignature or InvalidManifest."""
        manifest = open_manifest(envelope, self.pinned | {key for _, key in self._first})
        self.check(envelope.key_id, manifest.run_id, manifest.policy_version)
        return manifest


def chain_to_json(statements: Iterable[SignedEnvelope]) -> bytes:
    """Statements as HTTP and files carry them."""
    return b'{"rotations":[' + b",".join(map(envelope_to_json, statements)) + b"]}"


def chain_from_json(data: bytes) -> list[SignedEnvelope]:
    """Read statements, unchecked as yet. Raises InvalidRotation."""
    if len(data) > MAX_CHAIN_BYTES:
        raise InvalidRotation(f"key rotations have {len(data)} bytes; at most {MAX_CHAIN_BYTES} are allowed")
    try:
        items: Any = json.loads(data)["rotations"]
        if not isinstance(items, list) or len(items) > MAX_ROTATIONS:
            raise InvalidRotation(f"a list of at most {MAX_ROTATIONS} key rotations is due")
        return [envelope_from_json(json.dumps(item).encode()) for item in items]
    except (ValueError, KeyError, TypeError, RecursionError, InvalidManifest) as error:
        raise InvalidRotation(f"key rotations can't be read: {error!s:.90}") from None
