"""Invitations, by hash. Each lets in so many new keys until it expires."""

from __future__ import annotations

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store.tables import invites


async def add(
    connection: AsyncConnection, token_hash: str, *, uses: int, note: str, created_at: float, expires_at: float
) -> None:
    await connection.execute(
        invites.insert().values(
            token_hash=token_hash, uses_left=uses, note=note[:120], created_at=created_at, expires_at=expires_at
        )
    )


async def use(connection: AsyncConnection, token_hash: str, at: float) -> bool:
    """Use an invitation once; False if it is unknown, used up or expired."""
    good = (invites.c.token_hash == token_hash) & (invites.c.uses_left > 0) & (invites.c.expires_at > at)
    used = await connection.execute(update(invites).where(good).values(uses_left=invites.c.uses_left - 1))
    return used.rowcount == 1
