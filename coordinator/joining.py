"""Who may join: decided in the transaction that registers a key. A key that has joined before is not asked again."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from hashlib import sha256

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store import invites
from protocol.errors import UserError
from protocol.joining import INVITE, OPEN, WORK, work_of

_INVITE_PREFIX = "invite-"


@dataclass(frozen=True, slots=True)
class JoinRule:
    """`door`: open, invite or work. `work_bits`: how much work, where it is asked for."""

    door: str = OPEN
    work_bits: int = 0


ANYONE = JoinRule()


async def check(
    connection: AsyncConnection, rule: JoinRule, *, run_id: str, key_id: str, invite: str, nonce: int, at: float
) -> None:
    """Raises UserError if this new key may not join; an invitation that lets it in is used up by one."""
    if rule.door == INVITE:
        if not invite:
            raise UserError("this run is joined by invitation: ask its operator, then pass it by --invite")
        if not await invites.use(connection, hash_token(invite), at):
            raise UserError("this invitation is unknown, used up or has expired: ask the run's operator for another")
    elif rule.door == WORK and work_of(run_id, key_id, nonce) < rule.work_bits:
        raise UserError(f"this run asks new keys for {rule.work_bits} bits of work: update rollswarm")


def make_invite() -> str:
    """A new invitation. Only its hash is stored."""
    return _INVITE_PREFIX + secrets.token_urlsafe(24)


def hash_token(token: str) -> str:
    """What is stored of a secret of high entropy: a hash that can't be turned back (no salt is needed for 192 bits).

    A header may hold bytes that are no text, which arrive as lone surrogates: they have a hash too, of no token.
    """
    return sha256(b"rollswarm/v1/token\0" + token.encode("utf-8", "surrogatepass")).hexdigest()
