"""Ed25519 identities and signed envelopes.

A signature covers `"rollswarm/v1/<type>\\0" ‖ sha256(payload)`: the type keeps an envelope of one kind from being
passed off as another, and the payload is kept as the very bytes that were signed, never re-encoded.
A key id holds the whole public key (`ed25519:<64 hex>`), so checking a signature needs no look-up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from protocol.errors import BadSignature, UserError

KEY_ID_PREFIX = "ed25519:"
_KEY_ID_LENGTH = len(KEY_ID_PREFIX) + 64
SIGNATURE_BYTES = 64

# Envelope types in use. An envelope signed as one type never verifies as another.
MANIFEST = "manifest"
ROLLOUT = "rollout"
RECEIPT = "receipt"
CHALLENGE = "challenge"
DECLARATION = "declaration"
KEY_ROTATION = "key-rotation"
STATEMENT = "statement"
RENEWAL = "renewal"


@dataclass(frozen=True, slots=True)
class SignedEnvelope:
    """Payload bytes exactly as signed, the signer's key id, and a 64-byte Ed25519 signature."""

    payload: bytes
    key_id: str
    signature: bytes


class Identity:
    """An Ed25519 key pair. `key_id` names it everywhere; workers are known by it."""

    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        self._private_key = private_key
        public = private_key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        self.key_id = KEY_ID_PREFIX + public.hex()

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """The identity of a 32-byte secret; the caller draws it (this package has no randomness)."""
        if len(seed) != 32:
            raise UserError(f"an Ed25519 secret has 32 bytes, this one has {len(seed)}")
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def from_pem(cls, pem: bytes, passphrase: bytes | None = None) -> Identity:
        """Read a PKCS#8 PEM. Raises UserError if it is not an Ed25519 private key."""
        try:
            key = serialization.load_pem_private_key(pem, passphrase)
        except (ValueError, TypeError) as error:
            raise UserError(f"not a readable private key: {error}") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise UserError("the key is of another kind than Ed25519; make one with `worker identity`")
        return cls(key)

    def to_pem(self, passphrase: bytes | None = None) -> bytes:
        """The private key as PKCS#8 PEM, encrypted if a passphrase is given."""
        encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if passphrase:
            encryption = serialization.BestAvailableEncryption(passphrase)
        return self._private_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
        )

    def sign(self, envelope_type: str, payload: bytes) -> SignedEnvelope:
        """Sign `payload` as an envelope of `envelope_type`."""
        signature = self._private_key.sign(_message(envelope_type, payload))
        return SignedEnvelope(payload, self.key_id, signature)


def open_envelope(envelope: SignedEnvelope, envelope_type: str, pinned: Collection[str] | None = None) -> bytes:
    """Return the payload if its signature holds, else raise BadSignature.

    `pinned`: the key ids that may have signed it; None accepts any key (the caller looks at `key_id`).
    """
    if pinned is not None and envelope.key_id not in pinned:
        raise BadSignature(f"signed by {envelope.key_id[:24]}…, which is not a key this run pins")
    if len(envelope.signature) != SIGNATURE_BYTES:
        raise BadSignature(f"a signature has {SIGNATURE_BYTES} bytes, this one {len(envelope.signature)}")
    try:
        public_key(envelope.key_id).verify(envelope.signature, _message(envelope_type, envelope.payload))
    except InvalidSignature:
        raise BadSignature(f"the signature of this {envelope_type} does not match its payload and key") from None
    return envelope.payload


@lru_cache(maxsize=4096)
def public_key(key_id: str) -> Ed25519PublicKey:
    """The public key that a key id holds. Raises BadSignature if it is malformed: a key has one id, and is known by it."""
    if len(key_id) != _KEY_ID_LENGTH or not key_id.startswith(KEY_ID_PREFIX) or key_id != key_id.lower():
        raise BadSignature("a key id reads ed25519:<64 hex digits, in lower case>")
    try:
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(key_id[len(KEY_ID_PREFIX) :]))
    except ValueError as error:
        raise BadSignature(f"malformed key id: {error}") from error


def short_id(key_id: str) -> str:
    """The first eight hex digits of a key id, for people and log lines."""
    return key_id.removeprefix(KEY_ID_PREFIX)[:8]


def _message(envelope_type: str, payload: bytes) -> bytes:
    return b"rollswarm/v1/" + envelope_type.encode() + b"\0" + hashlib.sha256(payload).digest()
