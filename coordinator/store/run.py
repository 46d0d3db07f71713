"""The run's own row: its id, and the secret that seeds, tokens and audit draws derive from."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store import database
from coordinator.store.database import Database
from coordinator.store.tables import runs
from coordinator.store.versions import NEWEST
from protocol.errors import UserError


@dataclass(frozen=True, slots=True)
class Run:
    """What identifies a run for ever."""

    run_id: str
    name: str
    secret: bytes
    trainer_key: str
    paused: bool


async def load(db: Database) -> Run | None:
    """The run of this database, if it was begun."""
    async with db.read() as connection:
        row = (await connection.execute(select(runs).order_by(runs.c.created_at).limit(1))).first()
    return None if row is None else Run(row.run_id, row.name, row.secret, row.trainer_key, row.paused)


async def load_or_begin(db: Database, *, run_id: str, name: str, secret: bytes, trainer_key: str) -> Run:
    """The run of this database; begun with these values if it is new.

    Raises UserError if the database belongs to a run with another name or trainer key.
    """
    async with db.write() as connection:
        if (await connection.execute(select(runs.c.run_id))).first() is None:
            await connection.execute(
                runs.insert().values(
                    run_id=run_id,
                    name=name,
                    secret=secret,
                    trainer_key=trainer_key,
                    created_at=await database.now(connection),
                    paused=False,
                )
            )
    run = await load(db)
    assert run is not None
    if run.name != name:
        raise UserError(f"the database holds the run {run.name!r}, the run file names {name!r}: use another database")
    if run.trainer_key != trainer_key:
        raise UserError(
            "the database pins another trainer key than the run file (run.trainer_key): restore the right one"
        )
    return run


async def head_and_paused(connection: AsyncConnection) -> tuple[int | None, bool]:
    """The newest version that was not withdrawn, and whether no leases are granted: by one question."""
    row = (await connection.execute(_HEAD_AND_PAUSED)).one()
    return row.head, bool(row.paused)


_PAUSED = select(runs.c.paused).order_by(runs.c.created_at).limit(1)
_HEAD_AND_PAUSED = select(NEWEST.scalar_subquery().label("head"), _PAUSED.scalar_subquery().label("paused"))


async def set_paused(db: Database, paused: bool) -> None:
    """Stop or go on granting leases."""
    async with db.write() as connection:
        await connection.execute(update(runs).values(paused=paused))
