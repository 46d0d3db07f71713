"""What an operator does to a run by hand. Every change is an audit event."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from sqlalchemy import select
from sqlalchemy.exc import OperationalError, ProgrammingError

from coordinator import verdicts
from coordinator.hardware import HardwareState
from coordinator.store import database, events, evidence, hardware, workers
from coordinator.store import run as run_store
from coordinator.store import tables as t
from coordinator.store.database import Database
from coordinator.store.hardware import HardwareLine
from protocol.declaration import HARDWARE_LENGTH, printable
from protocol.errors import UserError
from protocol.ledger import Entry, EntryKind
from protocol.signing import KEY_ID_PREFIX


@asynccontextmanager
async def _opened(url: str) -> AsyncIterator[Database]:
    db = Database.open(url)
    try:
        await db.check()
        if await run_store.load(db) is None:
            raise UserError("the database holds no run yet: `coordinator serve` begins it")
        yield db
    except (OperationalError, ProgrammingError) as error:  # no such table
        raise UserError(f"cannot use the run's database ({error.orig}): has the run been served once?") from None
    finally:
        await db.close()


async def set_standing(url: str, worker: str, reason: str, *, banned: bool) -> str:
    """Ban or pardon the worker whose key id begins with `worker`; returns its id. Raises UserError if none or several do."""
    prefix = worker if worker.startswith(KEY_ID_PREFIX) else KEY_ID_PREFIX + worker
    async with _opened(url) as db, db.write() as connection:
        found = (
            (
                await connection.execute(
                    select(t.workers.c.worker_id).where(t.workers.c.worker_id.startswith(prefix, autoescape=True))
                )
            )
            .scalars()
            .all()
        )
        if len(found) != 1:
            raise UserError(f"{len(found)} workers have a key id that begins with {worker!r}: give more digits of one")
        at = await database.now(connection)
        kind = EntryKind.BAN if banned else EntryKind.PARDON
        await workers.add_entries(connection, [Entry(found[0], kind, 0, None, reason)], at)
        if banned:
            await verdicts.purge(connection, found[0], at=at, actor="operator", why=reason)
        else:
            await evidence.reset(connection, found[0])
            await events.record(connection, at=at, actor="operator", action="pardon", subject=found[0], detail=reason)
    return str(found[0])


async def decide_hardware(url: str, name: str, state: HardwareState) -> None:
    """Admit or refuse a hardware class, exactly as it is named, whether it was seen or not.

    From then on rollouts of an admitted class are judged like all others, and of a refused one nothing is leased out.
    """
    if name != printable(name, HARDWARE_LENGTH) or not name:
        raise UserError(f"no hardware class is named {name!r}: `coordinator classes` lists them")
    async with _opened(url) as db, db.write() as connection:
        at = await database.now(connection)
        await hardware.decide(connection, name, state.value, at)
        action = "admit" if state is HardwareState.ADMITTED else "refuse"
        await events.record(connection, at=at, actor="operator", action=action, subject=name, detail="hardware class")


async def list_hardware(url: str) -> Sequence[HardwareLine]:
    """The hardware classes of the run: those in shadow first."""
    async with _opened(url) as db, db.read() as connection:
        return await hardware.lines(connection)


async def set_paused(url: str, paused: bool) -> None:
    """Stop granting leases, or go on."""
    async with _opened(url) as db:
        await run_store.set_paused(db, paused)
        async with db.write() as connection:
            await events.record(
                connection,
                at=await database.now(connection),
                actor="operator",
                action="pause" if paused else "resume",
                subject="run",
                detail="",
            )
