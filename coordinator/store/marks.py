"""How far upkeep has come in tables that grow at one end: what lies before a mark is dealt with, for ever."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store import tables as t


async def read(connection: AsyncConnection, name: str) -> float:
    """The mark; 0 before anything was dealt with."""
    return float((await connection.execute(_mark(name))).scalar() or 0.0)


async def seize(connection: AsyncConnection, name: str) -> float:
    """The mark, which nobody else moves before the transaction ends."""
    there = (await connection.execute(_mark(name).with_for_update())).scalar()
    if there is None:
        insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
        await connection.execute(insert(t.marks).values(name=name, at=0.0).on_conflict_do_nothing())
        there = (await connection.execute(_mark(name).with_for_update())).scalar_one()
    return float(there)


async def move(connection: AsyncConnection, name: str, to: float) -> None:
    """Move a mark that was seized."""
    await connection.execute(update(t.marks).where(t.marks.c.name == name).values(at=to))


def _mark(name: str) -> Select[Any]:
    return select(t.marks.c.at).where(t.marks.c.name == name)
