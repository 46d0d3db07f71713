"""Audit events and counted drops: appended, never changed."""

from __future__ import annotations

import math
from collections.abc import Mapping

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store.tables import drops, events


def finite(numbers: Mapping[str, float]) -> dict[str, float]:
    """The numbers that JSON can hold."""
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def storable(text: str) -> str:
    """Words that may quote a stranger's: what no database holds (NUL, half of a surrogate pair) is replaced."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


async def record(connection: AsyncConnection, *, at: float, actor: str, action: str, subject: str, detail: str) -> None:
    """Append one audit event."""
    values = {"subject": storable(subject[:120]), "detail": storable(detail[:2000])}
    await connection.execute(events.insert().values(at=at, actor=actor, action=action, **values))


async def count_refusal(connection: AsyncConnection, *, at: float, reason: str) -> None:
    """Count a refusal that costs its worker nothing. One line per reason: these can be had without end."""
    same = (drops.c.reason == reason[:32]) & drops.c.rollout_id.is_(None) & (drops.c.tokens == 0)
    counted = await connection.execute(update(drops).where(same).values(count=drops.c.count + 1, dropped_at=at))
    if counted.rowcount == 0:
        await count_drop(connection, at=at, reason=reason, tokens=0)


async def count_drop(
    connection: AsyncConnection, *, at: float, reason: str, tokens: int, rollout_id: str | None = None, count: int = 1
) -> None:
    """Append one drop, by reason and length: nothing received disappears without a line here."""
    await connection.execute(
        drops.insert().values(rollout_id=rollout_id, reason=reason[:32], tokens=tokens, count=count, dropped_at=at)
    )
