"""Withdrawing policy versions that turned out bad: their numbers stay taken, and nothing made by them is trained on.

In one transaction: versions after the kept one are marked, every live lease is revoked (whoever works holds the bad weights,
or is about to; samples wait again with the same seeds), rollouts with a token of a withdrawn version are dropped, and
batches that no checkpoint holds are closed, for the trainer that held them goes back to before them, also where no version
came of them yet. Repeating it changes nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Row, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store import database, events, groups, leases, rollouts, versions
from coordinator.store import tables as t
from coordinator.store.database import Database
from protocol.errors import UserError
from protocol.lease import LeaseState, finish

REASON = "withdrawn"


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """`next_version`, `next_batch`: the first numbers never used. `withdrawn`: versions, `purged`: rollouts, this time."""

    next_version: int
    next_batch: int
    withdrawn: int
    purged: int


async def withdraw(db: Database, *, after: int) -> Withdrawal:
    """Withdraw all versions after `after`. Raises UserError if that one is not there to go back to."""
    async with db.write() as connection:
        at = await database.now(connection)
        if after not in await versions.digests(connection, oldest=after):
            raise UserError(f"version {after} is not published, or is withdrawn itself: choose another to go back to")
        numbers = await versions.withdraw(connection, after)
        out = await leases.live(connection) if numbers else []
        await leases.save_many(connection, [finish(lease, LeaseState.REVOKED) for lease in out])
        untrained = await rollouts.unconsumed_after(connection, after)
        for row in untrained:
            await _drop(connection, row, at)
        abandoned = await _close_batches(connection, at)
        if numbers or abandoned:
            await events.record(
                connection,
                at=at,
                actor="trainer",
                action="withdraw",
                subject=f"{numbers[0]}-{numbers[-1]}" if numbers else "steps",
                detail=f"back to version {after}; {len(untrained) + len(abandoned)} rollouts purged",
            )
        newest = (await connection.execute(select(func.max(t.policy_versions.c.version)))).scalar_one()
        last = (await connection.execute(select(func.max(t.batches.c.batch)))).scalar()
        return Withdrawal(newest + 1, 0 if last is None else last + 1, len(numbers), len(untrained) + len(abandoned))


async def _drop(connection: AsyncConnection, row: Row, at: float) -> None:
    await rollouts.drop(connection, row, REASON, at, again=True)
    group = await groups.get(connection, row.group_id)
    if group is not None and group.state == "ready":
        await groups.set_state(connection, row.group_id, "open")


async def _close_batches(connection: AsyncConnection, at: float) -> Sequence[Row]:
    """Batches that were served and not acknowledged are trained on by nobody."""
    open_batches = select(t.batches.c.batch).where(t.batches.c.acknowledged_at.is_(None))
    served = select(t.consumptions.c.rollout_id).where(t.consumptions.c.batch.in_(open_batches))
    rows = list(await connection.execute(select(t.rollouts).where(t.rollouts.c.rollout_id.in_(served))))
    for row in rows:
        await events.count_drop(connection, at=at, reason=REASON, tokens=row.tokens, rollout_id=row.rollout_id)
    await rollouts.set_state(connection, [row.rollout_id for row in rows], "dropped", REASON)
    await connection.execute(update(t.groups).where(t.groups.c.batch.in_(open_batches)).values(state="done"))
    await connection.execute(update(t.batches).where(t.batches.c.acknowledged_at.is_(None)).values(acknowledged_at=at))
    return rows
