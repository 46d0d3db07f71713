"""Operators' tokens, by hash."""

from __future__ import annotations

from sqlalchemy import Row, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.operators import Operator, Role
from coordinator.store.tables import operators
from protocol.errors import UserError


async def add(
    connection: AsyncConnection, *, name: str, role: Role, token_hash: str, created_at: float, expires_at: float | None
) -> None:
    """Raises UserError if somebody has this name already."""
    if (await connection.execute(select(operators.c.name).where(operators.c.name == name))).first() is not None:
        raise UserError(f"there is a token called {name!r} already: revoke it, or choose another name")
    await connection.execute(
        operators.insert().values(
            token_hash=token_hash,
            name=name,
            role=role.name.lower(),
            created_at=created_at,
            expires_at=expires_at,
            revoked=False,
        )
    )


async def find(connection: AsyncConnection, token_hash: str, at: float) -> Operator | None:
    """Whose token this is, None if it is nobody's, expired or revoked."""
    row = (await connection.execute(select(operators).where(operators.c.token_hash == token_hash))).first()
    if row is None or row.revoked or (row.expires_at is not None and row.expires_at <= at):
        return None
    return Operator(row.name, Role[row.role.upper()], token_hash)


async def revoke(connection: AsyncConnection, name: str) -> bool:
    """Whether there was such a token in force. The name stays taken: the audit log speaks of it."""
    live = (operators.c.name == name) & operators.c.revoked.is_(False)
    return (await connection.execute(update(operators).where(live).values(revoked=True))).rowcount == 1


async def every(connection: AsyncConnection) -> list[Row]:
    return list(await connection.execute(select(operators).order_by(operators.c.created_at)))
