"""Who may look at a run and change it: roles, their tokens, and the browser's sessions.

A token is shown once and stored as a hash. A session is a cookie that names the token's hash and an expiry, signed with a key
that derives from the run's secret: any replica can check it, and a revoked token ends its sessions at once, for the token is
looked up at every request. Forms carry a second value that derives from the session, which no other site can know.
"""

from __future__ import annotations

import enum
import hmac
import secrets
from dataclasses import dataclass
from hashlib import sha256

from protocol.errors import UserError

SESSION_LIFETIME_S = 12 * 3600
_PREFIX = "operator-"


class Role(enum.IntEnum):
    """Each may do what those before it may. A viewer sees everything; an operator acts; an admin changes settings too."""

    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3


@dataclass(frozen=True, slots=True)
class Operator:
    """Somebody whose token was checked."""

    name: str
    role: Role
    token_hash: str


def parse_role(text: str) -> Role:
    """Raises UserError if there is no such role."""
    try:
        return Role[text.upper()]
    except KeyError:
        raise UserError(f"there is no role {text!r}: viewer, operator or admin") from None


def make_token() -> str:
    """A new token; only its hash is to be stored."""
    return _PREFIX + secrets.token_urlsafe(32)


def make_session(secret: bytes, token_hash: str, now: float) -> str:
    """A cookie's value."""
    body = f"{token_hash}.{int(now + SESSION_LIFETIME_S)}"
    return f"{body}.{_mac(secret, 'session', body)}"


def check_session(secret: bytes, session: str, now: float) -> str | None:
    """The hash of the token that the session was opened with; None if it is forged or over."""
    body, _, mac = session.rpartition(".")
    token_hash, _, expiry = body.partition(".")
    if not hmac.compare_digest(mac.encode(), _mac(secret, "session", body).encode()) or now >= int(expiry):
        return None
    return token_hash


def csrf_of(secret: bytes, session: str) -> str:
    """What a form of this session must carry."""
    return _mac(secret, "csrf", session)


def _mac(secret: bytes, purpose: str, text: str) -> str:
    key = hmac.new(secret, b"operators", sha256).digest()
    return hmac.new(key, f"{purpose}\0{text}".encode(), sha256).hexdigest()
