"""Hardware classes that are not admitted by the run file alone: those in shadow, and the operator's decisions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store import tables as t
from coordinator.store.database import among
from protocol.lease import LeaseState

_USED = (LeaseState.LIVE.value, LeaseState.COMPLETED.value)
_LISTED = 64


@dataclass(frozen=True, slots=True)
class HardwareLine:
    """One class. `state`: admitted, shadow or refused. `accepted` and `rejected`: rollouts of it while it was in shadow;
    `rejections`: those by reason."""

    name: str
    state: str
    workers: int
    accepted: int = 0
    rejected: int = 0
    rejections: dict[str, int] | None = None


async def decision(connection: AsyncConnection, name: str) -> str | None:
    """What the operator decided about a class."""
    found = await connection.execute(select(t.hardware.c.decision).where(t.hardware.c.name == name))
    return found.scalar_one_or_none()


async def decisions(connection: AsyncConnection, names: Collection[str]) -> dict[str, str | None]:
    """What the operator decided about these classes; those that were never in shadow are not there."""
    mine = among(connection, t.hardware.c.name, list(names))
    return {row.name: row.decision for row in await connection.execute(select(t.hardware).where(mine))}


async def is_known(connection: AsyncConnection, name: str) -> bool:
    """Whether the class was seen in shadow, or decided about."""
    return (await connection.execute(select(t.hardware.c.name).where(t.hardware.c.name == name))).first() is not None


async def count_open(connection: AsyncConnection) -> int:
    """Classes in shadow that wait for the operator."""
    return int((await connection.execute(select(func.count()).where(t.hardware.c.decision.is_(None)))).scalar_one())


async def add(connection: AsyncConnection, name: str, at: float) -> None:
    """A class in shadow."""
    await connection.execute(t.hardware.insert().values(name=name, seen_at=at, accepted=0, rejected=0))


async def decide(connection: AsyncConnection, name: str, state: str, at: float) -> None:
    """Note the operator's decision."""
    if not await is_known(connection, name):
        await add(connection, name, at)
    await connection.execute(update(t.hardware).where(t.hardware.c.name == name).values(decision=state, decided_at=at))


async def count_used(connection: AsyncConnection, name: str) -> int:
    """Leases that a class has used up in shadow: those out, and those answered."""
    mine = t.leases.c.shadow.is_(True) & (t.leases.c.hardware == name) & t.leases.c.state.in_(_USED)
    return int((await connection.execute(select(func.count()).select_from(t.leases).where(mine))).scalar_one())


async def shadow_classes(connection: AsyncConnection, lease_ids: Sequence[str]) -> dict[str, str]:
    """The class of each of these leases that was granted in shadow."""
    mine = t.leases.c.shadow.is_(True) & among(connection, t.leases.c.lease_id, lease_ids)
    rows = await connection.execute(select(t.leases.c.lease_id, t.leases.c.hardware).where(mine))
    return {row.lease_id: row.hardware for row in rows}


async def count_verdict(connection: AsyncConnection, name: str, *, accepted: bool, count: int = 1) -> int:
    """So many more verdicts on rollouts in shadow; how many of that kind the class has now."""
    column = t.hardware.c.accepted if accepted else t.hardware.c.rejected
    await connection.execute(update(t.hardware).where(t.hardware.c.name == name).values({column: column + count}))
    return int((await connection.execute(select(column).where(t.hardware.c.name == name))).scalar_one_or_none() or 0)


async def lines(connection: AsyncConnection) -> Sequence[HardwareLine]:
    """Classes in shadow or decided about, and then those of workers, the most used first; a bounded number."""
    workers = dict(await _workers_by_class(connection))
    found = [
        HardwareLine(
            row.name,
            row.decision or "shadow",
            workers.pop(row.name, 0),
            row.accepted,
            row.rejected,
            await _rejections(connection, row.name),
        )
        for row in await connection.execute(
            select(t.hardware).order_by(t.hardware.c.decision.isnot(None), t.hardware.c.seen_at.desc()).limit(_LISTED)
        )
    ]
    return [*found, *(HardwareLine(name, "admitted", count) for name, count in workers.items())]


async def _workers_by_class(connection: AsyncConnection) -> list[tuple[str, int]]:
    count = func.count()
    rows = await connection.execute(
        select(t.workers.c.hardware_class, count)
        .where(t.workers.c.banned.is_(False))
        .group_by(t.workers.c.hardware_class)
        .order_by(count.desc(), t.workers.c.hardware_class)
        .limit(_LISTED)
    )
    return [(row[0], int(row[1])) for row in rows]


async def _rejections(connection: AsyncConnection, name: str) -> dict[str, int]:
    rows = await connection.execute(
        select(t.verdicts.c.reason, func.count())
        .join(t.rollouts, t.rollouts.c.rollout_id == t.verdicts.c.rollout_id)
        .join(t.leases, t.leases.c.lease_id == t.rollouts.c.lease_id)
        .where(t.leases.c.shadow.is_(True), t.leases.c.hardware == name, t.verdicts.c.outcome == "rejected")
        .group_by(t.verdicts.c.reason)
        .order_by(t.verdicts.c.reason)
    )
    return {row[0]: int(row[1]) for row in rows}
