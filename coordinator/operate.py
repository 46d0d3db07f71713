"""What an operator does on the machine that has the database: the same actions as over the API, as "operator"; and tokens.

Whoever can read the run file can do all of this, so no token is asked for here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from sqlalchemy.exc import OperationalError, ProgrammingError

from coordinator import actions, joining, operators
from coordinator.operators import Role
from coordinator.store import database, events, hardware
from coordinator.store import operators as operator_store
from coordinator.store import run as run_store
from coordinator.store.database import Database
from coordinator.store.hardware import HardwareLine
from protocol.errors import UserError

_ACTOR = "operator"


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Database]:
    """The run's database. Raises UserError if it can't be used, or holds no run yet."""
    db = Database.open(url)
    try:
        await db.check()
        if await run_store.load(db) is None:
            raise UserError("the database holds no run yet: `coordinator serve` begins it")
        yield db
    except (OperationalError, ProgrammingError) as error:  # no such table
        served = "has the run been served once (`coordinator serve`)?"
        raise UserError(f"cannot use the run's database ({error.orig}): {served}") from None
    finally:
        await db.close()


async def perform(url: str, action: str, arguments: Mapping[str, str]) -> str:
    """One of `coordinator.actions`; what was done. Raises UserError."""
    async with opened(url) as db, db.write() as connection:
        at = await database.now(connection)
        return await actions.perform(connection, action, arguments, actor=_ACTOR, at=at)


async def set_standing(url: str, worker: str, reason: str, *, banned: bool) -> str:
    """Ban or pardon the worker whose key id begins with `worker`; returns its id. Raises UserError if none or several do."""
    async with opened(url) as db, db.write() as connection:
        found = await actions.find_worker(connection, worker)
        at = await database.now(connection)
        await actions.set_standing(connection, found, reason, banned=banned, actor=_ACTOR, at=at)
    return found


async def list_hardware(url: str) -> Sequence[HardwareLine]:
    """The hardware classes of the run: those in shadow first."""
    async with opened(url) as db, db.read() as connection:
        return await hardware.lines(connection)


async def set_paused(url: str, paused: bool) -> None:
    """Stop granting leases, or go on."""
    await perform(url, "pause" if paused else "resume", {})


async def invite(url: str, *, uses: int, days: float, note: str) -> str:
    """Make an invitation for `uses` new keys within `days`; the token, which is stored nowhere. Raises UserError."""
    async with opened(url) as db, db.write() as connection:
        at = await database.now(connection)
        return await actions.invite(connection, uses, days, note, actor=_ACTOR, at=at)


async def make_token(url: str, name: str, role: Role, days: float | None) -> str:
    """A token for somebody; it is stored as a hash alone. Raises UserError if the name is taken."""
    token = operators.make_token()
    async with opened(url) as db, db.write() as connection:
        at = await database.now(connection)
        await operator_store.add(
            connection,
            name=name,
            role=role,
            token_hash=joining.hash_token(token),
            created_at=at,
            expires_at=None if days is None else at + days * 86_400,
        )
        detail = f"role {role.name.lower()}"
        await events.record(connection, at=at, actor=_ACTOR, action="token", subject=name, detail=detail)
    return token


async def revoke_token(url: str, name: str) -> None:
    """End a token and its sessions. Raises UserError if there is none."""
    async with opened(url) as db, db.write() as connection:
        if not await operator_store.revoke(connection, name):
            raise UserError(f"there is no token called {name!r} in force")
        at = await database.now(connection)
        await events.record(connection, at=at, actor=_ACTOR, action="revoke", subject=name, detail="")


async def list_tokens(url: str) -> list[str]:
    """One line per token: name, role, whether it is in force."""
    async with opened(url) as db, db.read() as connection:
        at = await database.now(connection)
        return [
            f"{row.name:24} {row.role:9} "
            + ("revoked" if row.revoked else "expired" if row.expires_at and row.expires_at <= at else "in force")
            for row in await operator_store.every(connection)
        ]
