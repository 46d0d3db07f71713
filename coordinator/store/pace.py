"""What the database knows of speeds: a worker's of late, the trainer's, and which leases hold up a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import ColumnElement, Float, Row, Select, String, bindparam, case, func, select, true
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.pace import WINDOW_S, Handed, OutLease, Pace, pace_of
from coordinator.store import many
from coordinator.store import tables as t

_STEPS = 8
_ROLLOUTS = 32


async def of_workers(connection: AsyncConnection, worker_ids: Sequence[str], at: float) -> dict[str, Pace | None]:
    """Each by the newest of what it handed in within the last ten minutes, however many those are."""
    if not worker_ids:
        return {}
    done: dict[str, list[tuple[int, float, float]]] = {worker_id: [] for worker_id in worker_ids}
    for row in await _newest(connection, worker_ids, at - WINDOW_S):
        done[row.worker_id].append((row.tokens, row.acquired_at, row.received_at))
    handed = {
        worker_id: Handed(found, min((received for _, _, received in found), default=at))
        for worker_id, found in done.items()
    }
    crowded = {
        worker_id: each
        for worker_id, each in handed.items()
        if len(each.newest) == _ROLLOUTS and each.span_s < each.mean_s
    }
    handed |= await _counted(connection, crowded, at - WINDOW_S)
    return {worker_id: pace_of(each) for worker_id, each in handed.items()}


async def _newest(connection: AsyncConnection, worker_ids: Sequence[str], since: float) -> list[Row[Any]]:
    """Up to `_ROLLOUTS` of each worker. One statement on PostgreSQL; SQLite, which has no LATERAL, has no round trips."""
    bounds = {"since": since, "most": _ROLLOUTS}
    if connection.dialect.name == "sqlite":
        each = [await connection.execute(_OF_ONE, {"worker": worker_id} | bounds) for worker_id in worker_ids]
        return [row for rows in each for row in rows]
    return list(await connection.execute(_OF_ALL, {"worker": list(worker_ids)} | bounds))


def _newest_of(worker_id: ColumnElement[str]) -> Select[Any]:
    return (
        select(t.rollouts.c.worker_id, t.rollouts.c.tokens, t.leases.c.acquired_at, t.rollouts.c.received_at)
        .join(t.leases, t.leases.c.lease_id == t.rollouts.c.lease_id)
        .where(t.rollouts.c.worker_id == worker_id, t.rollouts.c.received_at >= bindparam("since"))
        .order_by(t.rollouts.c.received_at.desc())
        .limit(bindparam("most"))
    )


def _newest_of_all() -> Select[Any]:
    asked = many.given({"worker": t.rollouts.c.worker_id.type})
    newest = _newest_of(asked.c.worker).lateral()
    return select(newest).select_from(asked.join(newest, true()))


async def _counted(connection: AsyncConnection, crowded: Mapping[str, Handed], since: float) -> dict[str, Handed]:
    """These with their crowds."""
    asked = {
        worker_id: max(received for _, _, received in each.newest) - each.mean_s for worker_id, each in crowded.items()
    }
    if not asked:
        return {}
    if connection.dialect.name == "sqlite":
        each = [
            await connection.execute(_CROWD_OF_ONE, {"worker": worker_id, "begin": begin, "since": since})
            for worker_id, begin in asked.items()
        ]
        rows = [row for found in each for row in found]
    else:
        arrays = {"worker": list(asked), "begin": list(asked.values())}
        rows = list(await connection.execute(_CROWD_OF_ALL, arrays | {"since": since}))
    found = {row.worker: row for row in rows}
    return {
        worker_id: replace(each, first=found[worker_id].first, crowd=found[worker_id].crowd, crowd_s=each.mean_s)
        for worker_id, each in crowded.items()
    }


def _crowd_of(worker_id: ColumnElement[str], begin: ColumnElement[float]) -> Select[Any]:
    """When the worker's first of late came, and how many after `begin`."""
    mine = t.rollouts.c.worker_id == worker_id
    first = select(func.min(t.rollouts.c.received_at)).where(mine, t.rollouts.c.received_at >= bindparam("since"))
    crowd = select(func.count()).select_from(t.rollouts).where(mine, t.rollouts.c.received_at > begin)
    return select(
        worker_id.label("worker"), first.scalar_subquery().label("first"), crowd.scalar_subquery().label("crowd")
    )


def _crowd_of_all() -> Select[Any]:
    asked = many.given({"worker": t.rollouts.c.worker_id.type, "begin": t.rollouts.c.received_at.type})
    return _crowd_of(asked.c.worker, asked.c.begin).select_from(asked)


_OF_ONE, _OF_ALL = _newest_of(bindparam("worker")), _newest_of_all()
_CROWD_OF_ONE = _crowd_of(bindparam("worker", type_=String()), bindparam("begin", type_=Float()))
_CROWD_OF_ALL = _crowd_of_all()


async def step_s(connection: AsyncConnection, at: float) -> float | None:
    """Seconds that the trainer takes for a step, None before it reported two; more if it has been waiting for longer.

    The latter keeps a run from standing still: the longer the trainer waits, the more time a slow worker has.
    """
    newest = select(t.steps.c.reported_at).order_by(t.steps.c.batch.desc()).limit(_STEPS)
    times = [float(time) for time in (await connection.execute(newest)).scalars()]
    if len(times) < 2 or times[0] <= times[-1]:
        return None
    return max((times[0] - times[-1]) / (len(times) - 1), at - times[0])


async def stragglers(connection: AsyncConnection, at: float, older_than_s: float) -> list[OutLease]:
    """Live leases, so old, in open groups of which nothing waits to be leased."""
    count = select(
        t.samples.c.group_id,
        func.sum(case((t.samples.c.state == "leased", 1), else_=0)).label("out"),
        func.sum(case((t.samples.c.state == "waiting", 1), else_=0)).label("waiting"),
    )
    old = (t.leases.c.state == "live") & (t.leases.c.acquired_at < at - older_than_s)
    held = select(t.samples.c.group_id).join(t.leases, t.leases.c.sample_id == t.samples.c.sample_id).where(old)
    groups = count.where(t.samples.c.group_id.in_(held)).group_by(t.samples.c.group_id).subquery()
    rows = await connection.execute(
        select(
            t.leases.c.lease_id,
            t.leases.c.sample_id,
            t.leases.c.worker_id,
            t.leases.c.acquired_at,
            t.leases.c.committed_length,
            t.groups.c.max_tokens,
            t.groups.c.n_samples,
            groups.c.out,
        )
        .join(t.samples, t.samples.c.sample_id == t.leases.c.sample_id)
        .join(t.groups, t.groups.c.group_id == t.samples.c.group_id)
        .join(groups, groups.c.group_id == t.groups.c.group_id)
        .where(old, t.groups.c.state == "open", groups.c.waiting == 0)
    )
    return [
        OutLease(
            lease_id=row.lease_id,
            sample_id=row.sample_id,
            worker_id=row.worker_id,
            age_s=at - row.acquired_at,
            committed=row.committed_length,
            max_tokens=row.max_tokens,
            group_out=int(row.out),
            group_size=row.n_samples,
        )
        for row in rows
    ]
