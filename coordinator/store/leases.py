"""Leases in the database. The rules are `protocol.lease`'s; here they are stored."""

from __future__ import annotations

from sqlalchemy import Row, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store.tables import leases, samples, workers
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


async def get(connection: AsyncConnection, lease_id: str) -> Lease | None:
    """The lease, None if there is none by this id, which may come from anybody."""
    if "\0" in lease_id:  # no text to PostgreSQL, which would fail the whole call
        return None
    row = (await connection.execute(select(leases).where(leases.c.lease_id == lease_id))).first()
    return None if row is None else _lease(row)


async def insert(
    connection: AsyncConnection, lease: Lease, at: float, *, hardware: str = UNDECLARED, shadow: bool = False
) -> None:
    """Store a new live lease and mark its sample leased. `hardware`: the worker's class, which is in shadow or not.

    Raises sqlalchemy's IntegrityError if the sample has a live lease already.
    """
    await connection.execute(
        leases.insert().values(
            lease_id=lease.lease_id,
            sample_id=lease.sample_id,
            worker_id=lease.worker_id,
            min_version=lease.min_version,
            acquired_at=at,
            deadline=lease.deadline,
            state=lease.state.value,
            committed_length=0,
            committed_digest=b"",
            committed_version=0,
            committed_signature=b"",
            earlier_commitments=[],
            hardware=hardware,
            shadow=shadow,
        )
    )
    await connection.execute(
        update(samples)
        .where(samples.c.sample_id == lease.sample_id)
        .values(state="leased", attempts=samples.c.attempts + 1)
    )


async def save(connection: AsyncConnection, lease: Lease) -> None:
    """Store a lease's new deadline, state and commitment."""
    await connection.execute(
        update(leases)
        .where(leases.c.lease_id == lease.lease_id)
        .values(
            deadline=lease.deadline,
            state=lease.state.value,
            committed_length=lease.commitment.length,
            committed_digest=lease.commitment.digest,
            committed_version=lease.commitment.version,
            committed_signature=lease.commitment.signature,
            earlier_commitments=[[each.length, each.digest.hex(), each.signature.hex()] for each in lease.earlier],
        )
    )


async def release(connection: AsyncConnection, lease: Lease) -> None:
    """Store a lease that ended without a rollout; its sample waits again, with the same seed."""
    await save(connection, lease)
    await connection.execute(
        update(samples)
        .where(samples.c.sample_id == lease.sample_id, samples.c.state == "leased")
        .values(state="waiting")
    )


async def overdue(connection: AsyncConnection, at: float) -> list[Lease]:
    """Live leases past their deadline."""
    rows = await connection.execute(select(leases).where(leases.c.state == "live", leases.c.deadline <= at))
    return [_lease(row) for row in rows]


async def live(connection: AsyncConnection) -> list[Lease]:
    return [_lease(row) for row in await connection.execute(select(leases).where(leases.c.state == "live"))]


async def live_of_worker(connection: AsyncConnection, worker_id: str) -> list[Lease]:
    rows = await connection.execute(select(leases).where(leases.c.state == "live", leases.c.worker_id == worker_id))
    return [_lease(row) for row in rows]


async def live_of_group(connection: AsyncConnection, group_id: str) -> list[Lease]:
    rows = await connection.execute(
        select(leases)
        .join(samples, samples.c.sample_id == leases.c.sample_id)
        .where(leases.c.state == "live", samples.c.group_id == group_id)
    )
    return [_lease(row) for row in rows]


async def count_live(connection: AsyncConnection) -> int:
    return int((await connection.execute(select(func.count()).where(leases.c.state == "live"))).scalar_one())


async def count_live_of_worker(connection: AsyncConnection, worker_id: str) -> int:
    statement = select(func.count()).where(leases.c.state == "live", leases.c.worker_id == worker_id)
    return int((await connection.execute(statement)).scalar_one())


async def count_live_of_newcomers(
    connection: AsyncConnection, probation_rollouts: int, address: str | None = None
) -> int:
    """Live leases of all workers that are still on probation, or were granted in shadow, together; of those from one
    address if it is given."""
    statement = (
        select(func.count())
        .select_from(leases.join(workers, workers.c.worker_id == leases.c.worker_id))
        .where(leases.c.state == "live", (workers.c.accepted < probation_rollouts) | leases.c.shadow.is_(True))
    )
    if address is not None:
        statement = statement.where(workers.c.address == address)
    return int((await connection.execute(statement)).scalar_one())


async def waiting_held_before(connection: AsyncConnection, worker_id: str) -> set[str]:
    """Waiting samples that this worker has held before: for it, all others come first."""
    rows = await connection.execute(
        select(leases.c.sample_id)
        .join(samples, samples.c.sample_id == leases.c.sample_id)
        .where(leases.c.worker_id == worker_id, samples.c.state == "waiting")
        .distinct()
    )
    return {row.sample_id for row in rows}
