"""Evidence of the tests over many rollouts, per worker and test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Row, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store import tables as t
from coordinator.verification.comparison import Member
from coordinator.verification.pooled import NEAR_TIES, NEAR_TIES_LOST
from coordinator.verification.pooling import STAKES, Evidence
from protocol.lease import LeaseState

_USUAL_OF_GROUPS = 64  # before this one


@dataclass(frozen=True, slots=True)
class Kept:
    """Evidence as it is stored. `alarmed_at`: its latest alarm."""

    evidence: Evidence
    alarmed_at: float | None = None


async def of_worker(connection: AsyncConnection, worker_id: str) -> dict[str, Kept]:
    """By test; tests that have seen nothing are not there."""
    rows = await connection.execute(select(t.evidence).where(t.evidence.c.worker_id == worker_id))
    return {row.test: Kept(_evidence(row), row.alarmed_at) for row in rows}


def _evidence(row: Row) -> Evidence:
    # Other stakes than those kept (of an older version of this program) begin again.
    bets = tuple(map(float, row.bets))
    return Evidence(row.test, bets if len(bets) == len(STAKES) else Evidence(row.test).bets, row.rollouts, row.tokens)


async def others(connection: AsyncConnection, test: str, worker_id: str, since: float) -> list[float]:
    """What the test holds against each other worker that it has heard of since then and that is not banned."""
    rows = await connection.execute(
        select(t.evidence.c.log_e)
        .join(t.workers, t.workers.c.worker_id == t.evidence.c.worker_id)
        .where(
            t.evidence.c.test == test,
            t.evidence.c.worker_id != worker_id,
            t.evidence.c.updated_at >= since,
            t.workers.c.banned.is_(False),
        )
    )
    return [float(row.log_e) for row in rows]


async def save(connection: AsyncConnection, worker_id: str, kept: Kept, at: float) -> None:
    evidence = kept.evidence
    values = {
        "bets": list(evidence.bets),
        "log_e": evidence.log_e,
        "rollouts": evidence.observations,
        "tokens": evidence.tokens,
        "updated_at": at,
        "alarmed_at": kept.alarmed_at,
    }
    mine = (t.evidence.c.worker_id == worker_id) & (t.evidence.c.test == evidence.test)
    changed = await connection.execute(update(t.evidence).where(mine).values(**values))
    if changed.rowcount == 0:
        await connection.execute(t.evidence.insert().values(worker_id=worker_id, test=evidence.test, **values))


async def reset(connection: AsyncConnection, worker_id: str) -> None:
    """Forget all that the tests hold against a worker."""
    await connection.execute(t.evidence.delete().where(t.evidence.c.worker_id == worker_id))
    await set_watched(connection, worker_id, False)


async def is_watched(connection: AsyncConnection, worker_id: str) -> bool:
    found = await connection.execute(select(t.workers.c.watched).where(t.workers.c.worker_id == worker_id))
    return bool(found.scalar())


async def set_watched(connection: AsyncConnection, worker_id: str, watched: bool) -> None:
    await connection.execute(update(t.workers).where(t.workers.c.worker_id == worker_id).values(watched=watched))


async def begin_comparison(connection: AsyncConnection, group_id: str) -> bool:
    """Mark a group as compared; False if it was before: a group that was opened again counts once."""
    first = (t.groups.c.group_id == group_id) & t.groups.c.compared.is_(False)
    return (await connection.execute(update(t.groups).where(first).values(compared=True))).rowcount == 1


async def members(connection: AsyncConnection, group_id: str) -> list[Member]:
    """The group's accepted rollouts."""
    rows = await connection.execute(
        select(
            t.rollouts.c.sample_id,
            t.rollouts.c.worker_id,
            t.rollouts.c.tokens,
            t.verdicts.c.reward,
            t.verdicts.c.metrics,
        )
        .join(t.verdicts, t.verdicts.c.rollout_id == t.rollouts.c.rollout_id)
        .where(t.rollouts.c.group_id == group_id, t.rollouts.c.state == "accepted")
    )
    return [
        Member(
            row.sample_id,
            row.worker_id,
            row.tokens,
            row.reward,
            row.metrics.get(NEAR_TIES),
            row.metrics.get(NEAR_TIES_LOST, 0.0),
        )
        for row in rows
    ]


async def given_up(connection: AsyncConnection, group_id: str) -> Sequence[tuple[str, str]]:
    """(worker, sample) of the group's leases that their holders let expire or returned."""
    ended = (LeaseState.EXPIRED.value, LeaseState.RETURNED.value)
    rows = await connection.execute(
        select(t.leases.c.worker_id, t.leases.c.sample_id)
        .join(t.samples, t.samples.c.sample_id == t.leases.c.sample_id)
        .where(t.samples.c.group_id == group_id, t.leases.c.state.in_(ended))
    )
    return [(row.worker_id, row.sample_id) for row in rows]


async def usual_reward(connection: AsyncConnection, group: Row) -> float | None:
    """The mean reward of the environment's groups shortly before this one."""
    recent = (t.groups.c.ordinal < group.ordinal) & (t.groups.c.ordinal >= group.ordinal - _USUAL_OF_GROUPS)
    mean = await connection.execute(
        select(func.avg(t.verdicts.c.reward))
        .join(t.rollouts, t.rollouts.c.rollout_id == t.verdicts.c.rollout_id)
        .join(t.groups, t.groups.c.group_id == t.rollouts.c.group_id)
        .where(recent, t.groups.c.environment == group.environment, t.verdicts.c.outcome == "accepted")
    )
    value = mean.scalar()
    return None if value is None else float(value)
