"""What the dashboard's pages list: newest first, page by page, and never more than a page."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row, Select, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store import tables as t
from coordinator.store import tallies

PAGE = 50
SORTS: dict[str, Any] = {
    "credits": t.workers.c.credits.desc(),
    "accepted": t.workers.c.accepted.desc(),
    "rejected": t.workers.c.rejected.desc(),
    "strikes": t.workers.c.strikes.desc(),
    "seen": t.workers.c.last_seen_at.desc(),
    "joined": t.workers.c.registered_at.desc(),
}


async def _rows(connection: AsyncConnection, statement: Select[Any]) -> list[Row]:
    return list(await connection.execute(statement))


async def workers(
    connection: AsyncConnection, *, search: str = "", standing: str = "", sort: str = "credits", page: int = 0
) -> list[Row]:
    """One page of workers, and one more row if there are others behind it."""
    statement = select(t.workers).order_by(SORTS.get(sort, SORTS["credits"]), t.workers.c.worker_id)
    if search:
        found = [column.contains(search, autoescape=True) for column in (t.workers.c.name, t.workers.c.worker_id)]
        statement = statement.where(or_(*found))
    if standing in ("banned", "active"):
        statement = statement.where(t.workers.c.banned.is_(standing == "banned"))
    return await _rows(connection, statement.offset(page * PAGE).limit(PAGE + 1))


async def worker(connection: AsyncConnection, worker_id: str) -> Row | None:
    return (await connection.execute(select(t.workers).where(t.workers.c.worker_id == worker_id))).first()


async def worker_evidence(connection: AsyncConnection, worker_id: str) -> list[Row]:
    """What tests over many rollouts hold against a worker, the most first."""
    mine = select(t.evidence).where(t.evidence.c.worker_id == worker_id)
    return await _rows(connection, mine.order_by(t.evidence.c.log_e.desc()))


async def strikes(connection: AsyncConnection, worker_id: str) -> list[Row]:
    """The worker's strikes, bans and pardons, each with what was measured where a rollout is behind it."""
    statement = (
        select(t.ledger, t.verdicts.c.metrics, t.verdicts.c.admitted, t.verdicts.c.detail)
        .outerjoin(t.verdicts, t.verdicts.c.rollout_id == t.ledger.c.rollout_id)
        .where(t.ledger.c.worker_id == worker_id, t.ledger.c.kind != "credit")
        .order_by(t.ledger.c.entry_id.desc())
        .limit(PAGE)
    )
    return await _rows(connection, statement)


async def ledger(connection: AsyncConnection, *, worker_id: str = "", before: int | None = None) -> list[Row]:
    statement = select(t.ledger).order_by(t.ledger.c.entry_id.desc()).limit(PAGE)
    if worker_id:
        statement = statement.where(t.ledger.c.worker_id == worker_id)
    if before is not None:
        statement = statement.where(t.ledger.c.entry_id < before)
    return await _rows(connection, statement)


async def ledger_sums(connection: AsyncConnection) -> dict[str, int]:
    """Amounts by kind, over the whole ledger."""
    return {kind: amount for (kind,), amount in (await tallies.total(connection, tallies.LEDGER)).items()}


async def events(connection: AsyncConnection, *, action: str = "", before: int | None = None) -> list[Row]:
    statement = select(t.events).order_by(t.events.c.event_id.desc()).limit(PAGE)
    if action:
        statement = statement.where(t.events.c.action == action)
    if before is not None:
        statement = statement.where(t.events.c.event_id < before)
    return await _rows(connection, statement)


async def event_actions(connection: AsyncConnection) -> list[str]:
    return list((await connection.execute(select(t.events.c.action).distinct().order_by("action"))).scalars())


async def rollouts(
    connection: AsyncConnection, *, worker_id: str = "", state: str = "", reason: str = "", before: float | None = None
) -> list[Row]:
    statement = (
        select(
            t.rollouts,
            t.verdicts.c.outcome,
            t.verdicts.c.reason,
            t.verdicts.c.reward,
            t.verdicts.c.audited,
            t.groups.c.environment,
            t.groups.c.task_index,
            t.workers.c.name,
        )
        .join(t.groups, t.groups.c.group_id == t.rollouts.c.group_id)
        .join(t.workers, t.workers.c.worker_id == t.rollouts.c.worker_id)
        .outerjoin(t.verdicts, t.verdicts.c.rollout_id == t.rollouts.c.rollout_id)
        .order_by(t.rollouts.c.received_at.desc(), t.rollouts.c.rollout_id)
        .limit(PAGE)
    )
    for column, value in (
        (t.rollouts.c.worker_id, worker_id),
        (t.rollouts.c.state, state),
        (t.verdicts.c.reason, reason),
    ):
        if value:
            statement = statement.where(column == value)
    if before is not None:
        statement = statement.where(t.rollouts.c.received_at < before)
    return await _rows(connection, statement)


async def rollout(connection: AsyncConnection, rollout_id: str) -> Row | None:
    """Everything about one rollout; payload and verdict are None where there are none (any more, or yet)."""
    statement = (
        select(
            t.rollouts,
            t.groups.c.environment,
            t.groups.c.task_index,
            t.groups.c.prompt,
            t.payloads.c.payload,
            t.verdicts.c.outcome,
            t.verdicts.c.reason,
            t.verdicts.c.detail,
            t.verdicts.c.reward,
            t.verdicts.c.audited,
            t.verdicts.c.old_logprobs,
            t.verdicts.c.metrics,
            t.verdicts.c.admitted,
            t.verdicts.c.verified_at,
            t.consumptions.c.batch,
            t.consumptions.c.staleness,
        )
        .join(t.groups, t.groups.c.group_id == t.rollouts.c.group_id)
        .outerjoin(t.payloads, t.payloads.c.rollout_id == t.rollouts.c.rollout_id)
        .outerjoin(t.verdicts, t.verdicts.c.rollout_id == t.rollouts.c.rollout_id)
        .outerjoin(t.consumptions, t.consumptions.c.rollout_id == t.rollouts.c.rollout_id)
        .where(t.rollouts.c.rollout_id == rollout_id)
    )
    return (await connection.execute(statement)).first()
