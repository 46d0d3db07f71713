"""Settings that were changed while the run goes on."""

from __future__ import annotations

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store.tables import knobs


async def read(connection: AsyncConnection) -> dict[str, float]:
    return {row.name: row.value for row in await connection.execute(select(knobs))}


async def write(connection: AsyncConnection, name: str, value: float, at: float) -> None:
    changed = await connection.execute(update(knobs).where(knobs.c.name == name).values(value=value, changed_at=at))
    if changed.rowcount == 0:
        await connection.execute(knobs.insert().values(name=name, value=value, changed_at=at))
