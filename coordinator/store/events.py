"""Audit events and counted drops: appended, never changed."""

from __future__ import annotations

import math
from collections.abc import Mapping

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store.tables import drops, events


def finite(numbers: Mapping[str, float]) -> dict[str, float]:
    """The numbers that JSON can hold."""
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


async def record(connection: AsyncConnection, *, at: float, actor: str, action: str, subject: str, detail: str) -> None:
    """Append one audit event."""
    await connection.execute(
        events.insert().values(at=at, actor=actor, action=action, subject=subject[:120], detail=detail[:2000])
    )


async def count_drop(
    connection: AsyncConnection, *, at: float, reason: str, tokens: int, rollout_id: str | None = None, count: int = 1
) -> None:
    """Append one drop, by reason and length: nothing received disappears without a line here."""
    await connection.execute(
        drops.insert().values(rollout_id=rollout_id, reason=reason[:32], tokens=tokens, count=count, dropped_at=at)
    )
