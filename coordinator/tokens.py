"""Challenges and bearer tokens: stateless, keyed by the run's secret, so any replica can check what another gave out.

    challenge = expiry (8 bytes) ‖ key id ‖ HMAC       signed by the worker's key, buys a
    token     = base64url(expiry ‖ key id ‖ HMAC)      that names the worker for 15 minutes

`now` is passed in (seconds by the database's clock).
"""

from __future__ import annotations

import base64
import binascii
import hmac
import struct
from hashlib import sha256

from protocol.errors import BadSignature

CHALLENGE_LIFETIME_S = 60
TOKEN_LIFETIME_S = 900
_MAC_BYTES = 32
_EXPIRY = struct.Struct(">Q")


def make_challenge(secret: bytes, key_id: str, now: float) -> bytes:
    return _make(secret, b"challenge", key_id, now + CHALLENGE_LIFETIME_S)


def check_challenge(secret: bytes, challenge: bytes, key_id: str, now: float) -> None:
    """Raises BadSignature if we did not give this challenge to this key, or it has expired."""
    if _check(secret, b"challenge", challenge, now) != key_id:
        raise BadSignature("the challenge was given to another key")


def make_token(secret: bytes, key_id: str, now: float) -> str:
    return base64.urlsafe_b64encode(_make(secret, b"token", key_id, now + TOKEN_LIFETIME_S)).decode()


def check_token(secret: bytes, token: str, now: float) -> str:
    """The key id that the token names. Raises BadSignature if it is forged or has expired."""
    try:
        raw = base64.urlsafe_b64decode(token.encode("ascii"))
    except (ValueError, binascii.Error):
        raise BadSignature("malformed token: register again") from None
    return _check(secret, b"token", raw, now)


def _make(secret: bytes, purpose: bytes, key_id: str, expiry: float) -> bytes:
    body = _EXPIRY.pack(int(expiry)) + key_id.encode()
    return body + _mac(secret, purpose, body)


def _check(secret: bytes, purpose: bytes, raw: bytes, now: float) -> str:
    body, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
    if len(body) <= _EXPIRY.size or not hmac.compare_digest(mac, _mac(secret, purpose, body)):
        raise BadSignature(f"this {purpose.decode()} was not given out by this run: register again")
    if now >= _EXPIRY.unpack(body[: _EXPIRY.size])[0]:
        raise BadSignature(f"this {purpose.decode()} has expired: register again")
    return body[_EXPIRY.size :].decode()


def _mac(secret: bytes, purpose: bytes, body: bytes) -> bytes:
    return hmac.new(secret, purpose + b"\0" + body, sha256).digest()
