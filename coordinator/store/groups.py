"""Groups and their samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import Row, bindparam, case, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store import many
from coordinator.store.database import among
from coordinator.store.tables import groups, leases, rollouts, samples


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A group as dispatch makes it. `seeds`: one 63-bit seed per sample."""

    group_id: str
    ordinal: int
    environment: str
    task_index: int
    prompt: str
    prompt_token_ids: tuple[int, ...]
    reference: Any
    max_tokens: int
    seeds: tuple[int, ...]
    deadline: float


@dataclass(frozen=True, slots=True)
class LeasableSample:
    """A sample with what a lease of it must say."""

    sample_id: str
    group_id: str
    seed: int
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    attempts: int = 0
    environment: str = ""


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, dtype="<u4").tobytes()


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(packed, dtype="<u4").tolist())


async def insert(connection: AsyncConnection, new: Sequence[NewGroup], at: float) -> list[LeasableSample]:
    """Store groups and their samples; the latter, which wait to be leased."""
    if not new:
        return []
    await many.insert(connection, groups, [_values(group, at) for group in new])
    rows = [
        {
            "sample_id": f"{group.group_id}-{i}",
            "group_id": group.group_id,
            "ordinal": group.ordinal * 4096 + i,
            "seed": seed,
            "state": "waiting",
            "attempts": 0,
        }
        for group in new
        for i, seed in enumerate(group.seeds)
    ]
    await many.insert(connection, samples, rows)
    return [
        LeasableSample(
            f"{group.group_id}-{i}",
            group.group_id,
            seed,
            group.prompt_token_ids,
            group.max_tokens,
            environment=group.environment,
        )
        for group in new
        for i, seed in enumerate(group.seeds)
    ]


def _values(group: NewGroup, at: float) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "ordinal": group.ordinal,
        "environment": group.environment,
        "task_index": group.task_index,
        "prompt": group.prompt,
        "prompt_token_ids": pack_tokens(group.prompt_token_ids),
        "reference": group.reference,
        "max_tokens": group.max_tokens,
        "n_samples": len(group.seeds),
        "state": "open",
        "created_at": at,
        "deadline": group.deadline,
    }


async def insert_skipped(
    connection: AsyncConnection, group_id: str, ordinal: int, environment: str, task_index: int, at: float
) -> None:
    """Note that a task was passed over, so that the environment's order goes on behind it."""
    await connection.execute(
        groups.insert().values(
            group_id=group_id,
            ordinal=ordinal,
            environment=environment,
            task_index=task_index,
            prompt="",
            prompt_token_ids=b"",
            reference=None,
            max_tokens=0,
            n_samples=0,
            state="dropped",
            created_at=at,
            deadline=at,
        )
    )


async def get(connection: AsyncConnection, group_id: str) -> Row | None:
    return (await connection.execute(select(groups).where(groups.c.group_id == group_id))).first()


async def get_all(connection: AsyncConnection, group_ids: Sequence[str]) -> list[Row]:
    """Those of these that there are, in the order of dispatch."""
    mine = among(connection, groups.c.group_id, group_ids)
    return list(await connection.execute(select(groups).where(mine).order_by(groups.c.ordinal)))


async def incomplete(connection: AsyncConnection, group_ids: Sequence[str]) -> set[str]:
    """Those of these groups of which a sample is not accepted."""
    rows = await connection.execute(
        select(samples.c.group_id)
        .where(among(connection, samples.c.group_id, group_ids), samples.c.state != "accepted")
        .distinct()
    )
    return {row.group_id for row in rows}


async def next_ordinal(connection: AsyncConnection) -> int:
    newest = (await connection.execute(select(func.max(groups.c.ordinal)))).scalar()
    return 0 if newest is None else newest + 1


async def count_by_environment(connection: AsyncConnection, since: int = 0) -> dict[str, int]:
    """Groups made from the ordinal `since` on, per environment: where each environment's order of tasks stands."""
    rows = await connection.execute(
        select(groups.c.environment, func.count().label("n")).where(groups.c.ordinal >= since).group_by("environment")
    )
    return {row.environment: row.n for row in rows}


async def used_by_worker(connection: AsyncConnection, worker_id: str) -> dict[str, int]:
    """Samples of each open group that this worker holds or has handed in (what was rejected or dropped counts not)."""
    answered = select(rollouts.c.sample_id, rollouts.c.group_id).where(
        rollouts.c.worker_id == worker_id, rollouts.c.state.in_(("pending", "verifying", "accepted"))
    )
    held = (
        select(samples.c.sample_id, samples.c.group_id)
        .join(leases, leases.c.sample_id == samples.c.sample_id)
        .where(leases.c.worker_id == worker_id, leases.c.state == "live")
    )
    used = answered.union_all(held).subquery()
    rows = await connection.execute(select(used.c.group_id, func.count().label("n")).group_by(used.c.group_id))
    return {row.group_id: row.n for row in rows}


async def waiting(connection: AsyncConnection, limit: int, *, after: int = 0) -> list[LeasableSample]:
    """Samples that wait for a lease, the oldest group's first, without the first `after` of them."""
    # From the samples to their groups: an outer join, and a condition that is true of no absent group, leave no other way.
    # Few samples wait and many groups are open, and a planner that thinks otherwise reads what waits anew for each of them.
    is_open = func.coalesce(groups.c.state, "") == "open"
    rows = await connection.execute(
        select(
            samples.c.sample_id,
            samples.c.seed,
            samples.c.attempts,
            groups.c.group_id,
            groups.c.prompt_token_ids,
            groups.c.max_tokens,
            groups.c.environment,
        )
        .outerjoin(groups, groups.c.group_id == samples.c.group_id)
        .where(samples.c.state == "waiting", is_open)
        .order_by(samples.c.ordinal)
        .limit(limit)
        .offset(after)
    )
    return [
        LeasableSample(
            row.sample_id,
            row.group_id,
            row.seed,
            unpack_tokens(row.prompt_token_ids),
            row.max_tokens,
            row.attempts,
            row.environment,
        )
        for row in rows
    ]


async def set_samples(connection: AsyncConnection, sample_ids: Sequence[str], state: str) -> None:
    if sample_ids:
        await _SET_SAMPLES.execute(connection, sample_ids, to_state=state)


_SET_SAMPLES = many.About(
    lambda mine: update(samples).where(mine).values(state=bindparam("to_state")), samples.c.sample_id
)


async def free_samples(connection: AsyncConnection, sample_ids: Sequence[str]) -> None:
    """Let these be leased again, with the same seed; but for those of closed groups, which nobody leases any more."""
    if sample_ids:
        await _FREE_SAMPLES.execute(connection, sample_ids)


_NOT_CLOSED = (
    select(groups.c.group_id)
    .where(groups.c.group_id == samples.c.group_id, groups.c.state.in_(("open", "ready")))
    .correlate(samples)
    .exists()
)
_FREE_SAMPLES = many.About(
    lambda mine: update(samples).where(mine).values(state=case((_NOT_CLOSED, "waiting"), else_="dropped")),
    samples.c.sample_id,
)


async def set_state(connection: AsyncConnection, group_id: str, state: str) -> None:
    await set_states(connection, [group_id], state)


async def set_states(connection: AsyncConnection, group_ids: Sequence[str], state: str) -> None:
    if group_ids:
        await connection.execute(
            update(groups).where(among(connection, groups.c.group_id, group_ids)).values(state=state)
        )


async def assign(connection: AsyncConnection, group_ids: Sequence[str], batch: int) -> None:
    """Serve these groups in `batch`."""
    mine = among(connection, groups.c.group_id, group_ids)
    await connection.execute(update(groups).where(mine).values(state="served", batch=batch))


async def drop_samples(connection: AsyncConnection, group_ids: Sequence[str]) -> None:
    """No sample of these groups is leased any more."""
    mine = among(connection, samples.c.group_id, group_ids) & samples.c.state.in_(("waiting", "leased"))
    await connection.execute(update(samples).where(mine).values(state="dropped"))


async def of_batch(connection: AsyncConnection, batch: int) -> list[Row]:
    """The groups served in this batch."""
    return list(await connection.execute(select(groups).where(groups.c.batch == batch).order_by(groups.c.ordinal)))


async def ready(connection: AsyncConnection, limit: int) -> list[Row]:
    """Complete groups that might be served now; oldest first."""
    complete = select(groups).where(groups.c.state == "ready").order_by(groups.c.ordinal).limit(limit)
    return list(await connection.execute(complete))


async def overdue(connection: AsyncConnection, at: float, limit: int) -> list[Row]:
    """Open groups past their deadline, which are served as they are or given up; oldest first."""
    late = (groups.c.state == "open") & (groups.c.deadline <= at)
    return list(await connection.execute(select(groups).where(late).order_by(groups.c.ordinal).limit(limit)))


async def accepted_rollouts(connection: AsyncConnection, group_ids: Sequence[str]) -> dict[str, list[Row]]:
    """Those of each of these groups."""
    found: dict[str, list[Row]] = {group_id: [] for group_id in group_ids}
    mine = among(connection, rollouts.c.group_id, group_ids) & (rollouts.c.state == "accepted")
    for row in await connection.execute(select(rollouts).where(mine)):
        found[row.group_id].append(row)
    return found
