"""Leases in the database. The rules are `protocol.lease`'s; here they are stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store import many
from coordinator.store.database import among
from coordinator.store.groups import set_samples
from coordinator.store.tables import groups, leases, samples, workers
from protocol.declaration import UNDECLARED
from protocol.lease import Commitment, Lease, LeaseState


def _lease(row: Row) -> Lease:
    return Lease(
        lease_id=row.lease_id,
        sample_id=row.sample_id,
        worker_id=row.worker_id,
        min_version=row.min_version,
        deadline=row.deadline,
        state=LeaseState(row.state),
        commitment=Commitment(
            row.committed_length, row.committed_digest, row.committed_version, row.committed_signature or b""
        ),
        earlier=tuple(_earlier(*each) for each in row.earlier_commitments),
    )


def _earlier(length: int, digest: str, signature: str = "") -> Commitment:
    return Commitment(length, bytes.fromhex(digest), signature=bytes.fromhex(signature))


async def seize(connection: AsyncConnection, lease_id: str) -> Lease | None:
    """The live lease, locked. None if it has ended, or if somebody renews or answers it at this moment."""
    mine = (leases.c.lease_id == lease_id) & (leases.c.state == "live")
    row = (await connection.execute(select(leases).where(mine).with_for_update(skip_locked=True))).first()
    return None if row is None else _lease(row)


@dataclass(frozen=True, slots=True)
class Held:
    """A lease with what a submission under it must be measured by: its group's id, greatest length and environment."""

    lease: Lease
    group_id: str
    max_tokens: int
    environment: str


async def held(connection: AsyncConnection, lease_ids: Iterable[str]) -> dict[str, Held]:
    """The leases of these ids that there are, locked until the transaction ends; the ids may come from anybody."""
    ids = sorted({lease_id for lease_id in lease_ids if "\0" not in lease_id})
    rows = await _HELD.execute(connection, ids)
    return {row.lease_id: Held(_lease(row), row.group_id, row.max_tokens, row.environment) for row in rows}


_HELD = many.About(
    lambda mine: (
        select(leases, samples.c.group_id, groups.c.max_tokens, groups.c.environment)
        .join(samples, samples.c.sample_id == leases.c.sample_id)
        .join(groups, groups.c.group_id == samples.c.group_id)
        .where(mine)
        .order_by(leases.c.lease_id)
        .with_for_update(of=leases)
    ),
    leases.c.lease_id,
)


async def live_among(connection: AsyncConnection, worker_id: str, lease_ids: Iterable[str]) -> set[str]:
    """Those of these ids, which may come from anybody, that are live leases of this worker."""
    ids = sorted({lease_id for lease_id in lease_ids if "\0" not in lease_id})
    statement = select(leases.c.lease_id).where(
        leases.c.worker_id == worker_id, leases.c.state == "live", among(connection, leases.c.lease_id, ids)
    )
    return set((await connection.execute(statement)).scalars())


async def complete(connection: AsyncConnection, ended: Sequence[Lease]) -> None:
    """Store that these leases, which must be completed, were answered; their samples are submitted."""
    assert all(lease.state is LeaseState.COMPLETED for lease in ended)
    if not ended:
        return
    await _COMPLETE.execute(connection, [lease.lease_id for lease in ended])
    await set_samples(connection, [lease.sample_id for lease in ended], "submitted")


_COMPLETE = many.About(
    lambda mine: update(leases).where(mine).values(state=LeaseState.COMPLETED.value, earlier_commitments=[]),
    leases.c.lease_id,
)


@dataclass(frozen=True, slots=True)
class NewLease:
    """A lease to be stored. `hardware`: its worker's class, which is in shadow or not."""

    lease: Lease
    hardware: str = UNDECLARED
    shadow: bool = False


async def insert(connection: AsyncConnection, new: Sequence[NewLease], at: float) -> None:
    """Store new live leases and mark their samples leased.

    Raises sqlalchemy's IntegrityError if a sample has a live lease already.
    """
    if not new:
        return
    await many.insert(connection, leases, [_values(each, at) for each in new])
    await _LEASED.execute(connection, [each.lease.sample_id for each in new])


_LEASED = many.About(
    lambda mine: update(samples).where(mine).values(state="leased", attempts=samples.c.attempts + 1),
    samples.c.sample_id,
)


def _values(new: NewLease, at: float) -> dict[str, Any]:
    lease = new.lease
    return {
        "lease_id": lease.lease_id,
        "sample_id": lease.sample_id,
        "worker_id": lease.worker_id,
        "min_version": lease.min_version,
        "acquired_at": at,
        "deadline": lease.deadline,
        "state": lease.state.value,
        "committed_length": 0,
        "committed_digest": b"",
        "committed_version": 0,
        "committed_signature": b"",
        "earlier_commitments": [],
        "hardware": new.hardware,
        "shadow": new.shadow,
    }


async def save_many(connection: AsyncConnection, changed: Sequence[Lease]) -> None:
    """Store leases as they are now; the samples of those that ended without a rollout wait again, with the same seed."""
    if not changed:
        return
    ordered = sorted(changed, key=lambda lease: lease.lease_id)
    await _SAVE.execute(connection, [_changing(lease) for lease in ordered])
    free = [each.sample_id for each in ordered if each.state not in (LeaseState.LIVE, LeaseState.COMPLETED)]
    if free:
        theirs = among(connection, samples.c.sample_id, free) & (samples.c.state == "leased")
        await connection.execute(update(samples).where(theirs).values(state="waiting"))


_CHANGING = (
    "deadline",
    "state",
    "committed_length",
    "committed_digest",
    "committed_version",
    "committed_signature",
    "earlier_commitments",
)
_SAVE = many.UpdateMany(
    lambda given: (
        update(leases).where(leases.c.lease_id == given("of_lease")).values({name: given(name) for name in _CHANGING})
    ),
    of_lease=leases.c.lease_id.type,
    **{name: leases.c[name].type for name in _CHANGING},
)


def _changing(lease: Lease) -> dict[str, Any]:
    return {
        "of_lease": lease.lease_id,
        "deadline": lease.deadline,
        "state": lease.state.value,
        "committed_length": lease.commitment.length,
        "committed_digest": lease.commitment.digest,
        "committed_version": lease.commitment.version,
        "committed_signature": lease.commitment.signature,
        # Nothing can be handed in any more under a lease that ended: what it would be measured by is forgotten.
        "earlier_commitments": [
            [each.length, each.digest.hex(), each.signature.hex()]
            for each in (lease.earlier if lease.state is LeaseState.LIVE else ())
        ],
    }


async def overdue(connection: AsyncConnection, at: float) -> list[Lease]:
    """Live leases past their deadline, locked; those that somebody renews or answers at this moment are left out."""
    rows = await connection.execute(
        select(leases).where(leases.c.state == "live", leases.c.deadline <= at).with_for_update(skip_locked=True)
    )
    return [_lease(row) for row in rows]


async def live(connection: AsyncConnection) -> list[Lease]:
    return [_lease(row) for row in await connection.execute(select(leases).where(leases.c.state == "live"))]


async def live_of_worker(connection: AsyncConnection, worker_id: str) -> list[Lease]:
    rows = await connection.execute(select(leases).where(leases.c.state == "live", leases.c.worker_id == worker_id))
    return [_lease(row) for row in rows]


async def live_of_groups(connection: AsyncConnection, group_ids: Sequence[str]) -> list[Lease]:
    """The live leases of these groups' samples, locked."""
    leased = select(samples.c.sample_id).where(
        among(connection, samples.c.group_id, group_ids), samples.c.state == "leased"
    )
    out = list((await connection.execute(leased)).scalars())
    if not out:
        return []
    rows = await connection.execute(
        select(leases)
        .where(leases.c.state == "live", among(connection, leases.c.sample_id, out))
        .order_by(leases.c.lease_id)
        .with_for_update()
    )
    return [_lease(row) for row in rows]


async def count_live(connection: AsyncConnection) -> int:
    return int((await connection.execute(select(func.count()).where(leases.c.state == "live"))).scalar_one())


async def count_live_of_workers(connection: AsyncConnection, worker_ids: Sequence[str]) -> dict[str, int]:
    """Live leases of each of these workers; who has none is not there."""
    return {row.worker_id: row.n for row in await _LIVE_OF_WORKERS.execute(connection, worker_ids)}


_LIVE_OF_WORKERS = many.About(
    lambda mine: (
        select(leases.c.worker_id, func.count().label("n"))
        .where(leases.c.state == "live", mine)
        .group_by(leases.c.worker_id)
    ),
    leases.c.worker_id,
)


async def count_live_of_newcomers(connection: AsyncConnection, probation_rollouts: int) -> dict[str, int]:
    """By address: live leases of workers that are still on probation, or were granted in shadow."""
    # Counted by worker before workers are looked up: there are many leases to each.
    out = (
        select(leases.c.worker_id, leases.c.shadow, func.count().label("n"))
        .where(leases.c.state == "live")
        .group_by(leases.c.worker_id, leases.c.shadow)
        .subquery()
    )
    statement = (
        select(workers.c.address, func.sum(out.c.n).label("n"))
        .join(out, out.c.worker_id == workers.c.worker_id)
        .where((workers.c.accepted < probation_rollouts) | out.c.shadow.is_(True))
        .group_by(workers.c.address)
    )
    return {row.address: int(row.n) for row in await connection.execute(statement)}


async def held_before(
    connection: AsyncConnection, worker_ids: Sequence[str], sample_ids: Sequence[str]
) -> dict[str, set[str]]:
    """By worker: those of these samples that it has held before. For it, all others come first."""
    found: dict[str, set[str]] = {}
    if not sample_ids:
        return found
    rows = await connection.execute(
        select(leases.c.worker_id, leases.c.sample_id).where(
            among(connection, leases.c.worker_id, worker_ids), among(connection, leases.c.sample_id, sample_ids)
        )
    )
    for row in rows:
        found.setdefault(row.worker_id, set()).add(row.sample_id)
    return found
