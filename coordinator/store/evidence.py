"""Evidence of the tests over many rollouts, per worker and test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store import many
from coordinator.store import tables as t
from coordinator.store.database import among
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


class Book:
    """Evidence of some workers within one transaction: read once, changed in memory, written once."""

    def __init__(self, connection: AsyncConnection, at: float) -> None:
        self.connection = connection
        self.at = at
        self._kept: dict[str, dict[str, Kept]] = {}
        self._watched: dict[str, bool] = {}
        self._stored: set[tuple[str, str]] = set()
        self._changed: set[tuple[str, str]] = set()

    async def read(self, worker_ids: Iterable[str]) -> None:
        """Make these workers known."""
        new = sorted(set(worker_ids) - set(self._kept))
        if not new:
            return
        self._kept |= {worker_id: {} for worker_id in new}
        for row in await _EVIDENCE.execute(self.connection, new):
            self._kept[row.worker_id][row.test] = Kept(_evidence(row), row.alarmed_at)
            self._stored.add((row.worker_id, row.test))
        watched = await _WATCHED.execute(self.connection, new)
        self._watched |= {row.worker_id: bool(row.watched) for row in watched}

    def of_worker(self, worker_id: str) -> Mapping[str, Kept]:
        """By test; tests that have seen nothing are not there."""
        return self._kept[worker_id]

    def is_watched(self, worker_id: str) -> bool:
        return self._watched.get(worker_id, False)

    def keep(self, worker_id: str, kept: Kept) -> None:
        self._kept[worker_id][kept.evidence.test] = kept
        self._changed.add((worker_id, kept.evidence.test))

    async def set_watched(self, worker_id: str, watched: bool) -> None:
        self._watched[worker_id] = watched
        await set_watched(self.connection, worker_id, watched)

    async def write(self) -> None:
        """Store what was changed."""
        known, new = sorted(self._changed & self._stored), sorted(self._changed - self._stored)
        await _UPDATE.execute(self.connection, self._rows(known, "of_worker", "of_test"))
        await many.insert(self.connection, t.evidence, self._rows(new, "worker_id", "test"))
        self._stored |= self._changed
        self._changed.clear()

    def _rows(self, keys: Sequence[tuple[str, str]], worker: str, name: str) -> list[dict[str, Any]]:
        """What is kept under these keys, which have these names."""
        return [
            {worker: worker_id, name: test} | _values(self._kept[worker_id][test], self.at) for worker_id, test in keys
        ]


_EVIDENCE = many.About(lambda mine: select(t.evidence).where(mine), t.evidence.c.worker_id)
_WATCHED = many.About(
    lambda mine: select(t.workers.c.worker_id, t.workers.c.watched).where(mine), t.workers.c.worker_id
)


def _evidence(row: Row) -> Evidence:
    # Other stakes than those kept (of an older version of this program) begin again.
    bets = tuple(map(float, row.bets))
    return Evidence(row.test, bets if len(bets) == len(STAKES) else Evidence(row.test).bets, row.rollouts, row.tokens)


def _values(kept: Kept, at: float) -> dict[str, Any]:
    evidence = kept.evidence
    return {
        "bets": list(evidence.bets),
        "log_e": evidence.log_e,
        "rollouts": evidence.observations,
        "tokens": evidence.tokens,
        "updated_at": at,
        "alarmed_at": kept.alarmed_at,
    }


_CHANGING = ("bets", "log_e", "rollouts", "tokens", "updated_at", "alarmed_at")
_UPDATE = many.UpdateMany(
    lambda given: (
        update(t.evidence)
        .where(t.evidence.c.worker_id == given("of_worker"), t.evidence.c.test == given("of_test"))
        .values({name: given(name) for name in _CHANGING})
    ),
    of_worker=t.evidence.c.worker_id.type,
    of_test=t.evidence.c.test.type,
    **{name: t.evidence.c[name].type for name in _CHANGING},
)


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


async def reset(connection: AsyncConnection, worker_id: str) -> None:
    """Forget all that the tests hold against a worker."""
    await connection.execute(t.evidence.delete().where(t.evidence.c.worker_id == worker_id))
    await set_watched(connection, worker_id, False)


async def set_watched(connection: AsyncConnection, worker_id: str, watched: bool) -> None:
    await connection.execute(update(t.workers).where(t.workers.c.worker_id == worker_id).values(watched=watched))


async def begin_comparison(connection: AsyncConnection, of: Sequence[Row]) -> list[Row]:
    """Mark these groups as compared; those that were not before: a group that was opened again counts once."""
    first = [group for group in of if not group.compared]
    if first:
        mine = among(connection, t.groups.c.group_id, [group.group_id for group in first])
        await connection.execute(update(t.groups).where(mine).values(compared=True))
    return first


async def members(connection: AsyncConnection, group_ids: Sequence[str]) -> dict[str, list[Member]]:
    """The accepted rollouts of each group."""
    rows = await connection.execute(
        select(
            t.rollouts.c.group_id,
            t.rollouts.c.sample_id,
            t.rollouts.c.worker_id,
            t.rollouts.c.tokens,
            t.verdicts.c.reward,
            t.verdicts.c.metrics,
        )
        .join(t.verdicts, t.verdicts.c.rollout_id == t.rollouts.c.rollout_id)
        .where(among(connection, t.rollouts.c.group_id, group_ids), t.rollouts.c.state == "accepted")
    )
    found: dict[str, list[Member]] = {group_id: [] for group_id in group_ids}
    for row in rows:
        member = Member(
            row.sample_id,
            row.worker_id,
            row.tokens,
            row.reward,
            row.metrics.get(NEAR_TIES),
            row.metrics.get(NEAR_TIES_LOST, 0.0),
        )
        found[row.group_id].append(member)
    return found


async def given_up(connection: AsyncConnection, group_ids: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
    """(worker, sample) of each group's leases that their holders let expire or returned."""
    ended = (LeaseState.EXPIRED.value, LeaseState.RETURNED.value)
    found: dict[str, list[tuple[str, str]]] = {group_id: [] for group_id in group_ids}
    again = select(t.samples.c.sample_id, t.samples.c.group_id).where(
        among(connection, t.samples.c.group_id, group_ids), t.samples.c.attempts > 1
    )
    of_sample = {row.sample_id: row.group_id for row in await connection.execute(again)}
    if not of_sample:
        return found
    rows = await connection.execute(
        select(t.leases.c.worker_id, t.leases.c.sample_id).where(
            among(connection, t.leases.c.sample_id, sorted(of_sample)), t.leases.c.state.in_(ended)
        )
    )
    for row in rows:
        found[of_sample[row.sample_id]].append((row.worker_id, row.sample_id))
    return found


async def usual_reward(connection: AsyncConnection, environment: str, before: int) -> float | None:
    """The mean reward of the environment's groups shortly before this ordinal."""
    recent = (t.groups.c.ordinal < before) & (t.groups.c.ordinal >= before - _USUAL_OF_GROUPS)
    mean = await connection.execute(
        select(func.avg(t.verdicts.c.reward))
        .join(t.rollouts, t.rollouts.c.rollout_id == t.verdicts.c.rollout_id)
        .join(t.groups, t.groups.c.group_id == t.rollouts.c.group_id)
        .where(recent, t.groups.c.environment == environment, t.verdicts.c.outcome == "accepted")
    )
    value = mean.scalar()
    return None if value is None else float(value)
