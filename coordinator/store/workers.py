"""Workers, and the ledger of their credits and strikes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, Row, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store import many
from coordinator.store.database import among
from coordinator.store.tables import ledger, workers
from protocol.declaration import Declaration
from protocol.ledger import Entry, EntryKind, Standing, fold

_PART = 2000  # of a ledger's lines that are fetched at once


async def register(
    connection: AsyncConnection,
    *,
    worker_id: str,
    name: str,
    hardware: str,
    software: str,
    address: str,
    at: float,
    declared: Declaration | None = None,
) -> None:
    """Make a worker known, or refresh what it says about itself. `declared`: None leaves what it declared before."""
    values = {"name": name, "hardware": hardware, "software": software, "address": address, "last_seen_at": at}
    if declared is not None:
        values |= {"precision": declared.precision, "hardware_class": declared.hardware}
    changed = await connection.execute(update(workers).where(workers.c.worker_id == worker_id).values(**values))
    if changed.rowcount == 0:
        await connection.execute(
            workers.insert().values(
                worker_id=worker_id,
                registered_at=at,
                credits=0,
                strikes=0,
                accepted=0,
                rejected=0,
                banned=False,
                ban_reason="",
                **values,
            )
        )


async def declared(connection: AsyncConnection, worker_id: str) -> Declaration | None:
    """What the worker declared last, None if it never registered."""
    columns = select(workers.c.precision, workers.c.hardware_class).where(workers.c.worker_id == worker_id)
    row = (await connection.execute(columns)).first()
    return None if row is None else Declaration(row.precision, row.hardware_class)


async def seen(connection: AsyncConnection, worker_ids: Sequence[str], at: float) -> None:
    """Note that these workers are alive; not of one whose standing is being written: it is seen the next time."""
    if worker_ids:
        mine = among(connection, workers.c.worker_id, worker_ids)
        free = select(workers.c.worker_id).where(mine).with_for_update(skip_locked=True, key_share=True)
        await connection.execute(update(workers).where(workers.c.worker_id.in_(free)).values(last_seen_at=at))


@dataclass(frozen=True, slots=True)
class Known:
    """A worker as leasing knows it."""

    worker_id: str
    standing: Standing
    address: str
    declared: Declaration
    seen_at: float


async def known(connection: AsyncConnection, worker_ids: Sequence[str]) -> dict[str, Known]:
    """Those of these workers that ever registered."""
    rows = await _KNOWN.execute(connection, worker_ids)
    return {
        row.worker_id: Known(
            row.worker_id,
            standing_of(row),
            row.address,
            Declaration(row.precision, row.hardware_class),
            row.last_seen_at,
        )
        for row in rows
    }


_KNOWN = many.About(lambda mine: select(workers).where(mine), workers.c.worker_id)


async def two_active(connection: AsyncConnection, since: float) -> list[str]:
    """Two of the workers that may work and were here since then; fewer if there are fewer."""
    active = workers.c.banned.is_(False) & (workers.c.last_seen_at >= since)
    return list((await connection.execute(select(workers.c.worker_id).where(active).limit(2))).scalars())


async def newcomers_at(connection: AsyncConnection, probation_rollouts: int, since: float) -> tuple[str, str] | None:
    """The first and the last, by name, of the addresses from which workers on probation that may work were here since then:
    they differ if there are several. None: there are none."""
    row = (
        await connection.execute(
            select(func.min(workers.c.address), func.max(workers.c.address)).where(
                workers.c.banned.is_(False),
                workers.c.accepted < probation_rollouts,
                workers.c.last_seen_at >= since,
            )
        )
    ).one()
    return None if row[0] is None else (row[0], row[1])


async def standing(connection: AsyncConnection, worker_id: str) -> Standing | None:
    """The worker's standing, None if it never registered."""
    row = (await connection.execute(select(workers).where(workers.c.worker_id == worker_id))).first()
    return None if row is None else standing_of(row)


def standing_of(row: Row) -> Standing:
    """The standing that a row of `workers` keeps."""
    return Standing(row.credits, row.strikes, row.accepted, row.banned, row.ban_reason, row.clean_tokens)


async def add_entries(connection: AsyncConnection, entries: Iterable[Entry], at: float) -> None:
    """Append to the ledger and refold the standing of each worker concerned, in this transaction.

    Raises sqlalchemy's IntegrityError if a rollout would be credited or struck twice.
    """
    by_worker: dict[str, list[Entry]] = {}
    for entry in entries:
        by_worker.setdefault(entry.worker_id, []).append(entry)
        await connection.execute(ledger.insert().values(**_line(entry, at)))
    for worker_id, added in by_worker.items():
        await _apply(connection, worker_id, added)


async def credit(connection: AsyncConnection, entries: Sequence[Entry], at: float) -> None:
    """`add_entries` for credits alone, which fold without regard to what was before.

    Raises sqlalchemy's IntegrityError if a rollout would be credited twice.
    """
    assert all(entry.kind is EntryKind.CREDIT for entry in entries)
    if not entries:
        return
    await many.insert(connection, ledger, [_line(entry, at) for entry in entries])
    added: dict[str, dict[str, Any]] = {}
    for entry in entries:
        sums = added.setdefault(entry.worker_id, {"of_worker": entry.worker_id, "tokens": 0, "count": 0})
        sums["tokens"] += entry.amount
        sums["count"] += 1
    await _CREDIT.execute(connection, [added[worker_id] for worker_id in sorted(added)])


_CREDIT = many.UpdateMany(
    lambda given: (
        update(workers)
        .where(workers.c.worker_id == given("of_worker"))
        .values(
            credits=workers.c.credits + given("tokens"),
            clean_tokens=workers.c.clean_tokens + given("tokens"),
            accepted=workers.c.accepted + given("count"),
        )
    ),
    of_worker=workers.c.worker_id.type,
    tokens=BigInteger(),
    count=BigInteger(),
)


def _line(entry: Entry, at: float) -> dict[str, Any]:
    return {
        "worker_id": entry.worker_id,
        "kind": entry.kind.value,
        "amount": entry.amount,
        "rollout_id": entry.rollout_id,
        "note": entry.note[:2000],
        "created_at": at,
    }


async def _apply(connection: AsyncConnection, worker_id: str, added: list[Entry]) -> None:
    """Fold `added` onto the stored standing (equal to folding the whole ledger, without reading it)."""
    before = await standing(connection, worker_id)
    assert before is not None, f"ledger entry for unknown worker {worker_id}"
    delta = fold(added)
    pardoned = any(entry.kind is EntryKind.PARDON for entry in added)
    unclean = pardoned or any(entry.kind is EntryKind.STRIKE for entry in added)
    banned, reason = before.banned, before.ban_reason
    if pardoned or delta.banned:
        banned, reason = delta.banned, delta.ban_reason
    await connection.execute(
        update(workers)
        .where(workers.c.worker_id == worker_id)
        .values(
            credits=before.credits + delta.credits,
            accepted=before.accepted + delta.accepted,
            strikes=delta.strikes if pardoned else before.strikes + delta.strikes,
            banned=banned,
            ban_reason=reason,
            clean_tokens=delta.clean_tokens if unclean else before.clean_tokens + delta.clean_tokens,
        )
    )


async def count_rejection(connection: AsyncConnection, worker_id: str) -> None:
    """One more rejected rollout, for the worker's own eyes and the dashboard."""
    await connection.execute(
        update(workers).where(workers.c.worker_id == worker_id).values(rejected=workers.c.rejected + 1)
    )


async def entries(connection: AsyncConnection, worker_id: str) -> list[Entry]:
    """The worker's ledger, oldest first."""
    return [entry_of(row) for row in await ledger_rows(connection, worker_id)]


async def ledger_rows(connection: AsyncConnection, worker_id: str) -> list[Row[Any]]:
    """The worker's lines, oldest first, fetched in parts: others have their turn meanwhile."""
    wanted = select(ledger).where(ledger.c.worker_id == worker_id).order_by(ledger.c.entry_id)
    rows: list[Row[Any]] = []
    async with connection.stream(wanted) as found:
        async for part in found.partitions(_PART):
            rows.extend(part)
    return rows


async def ledger_mark(connection: AsyncConnection, worker_id: str) -> tuple[int, int]:
    """The worker's last line and how many there are: never the same again once there is a new one, in whatever order lines are
    committed."""
    wanted = select(func.max(ledger.c.entry_id), func.count()).where(ledger.c.worker_id == worker_id)
    row = (await connection.execute(wanted)).one()
    return row[0] or 0, row[1]


def entry_of(row: Row[Any]) -> Entry:
    return Entry(row.worker_id, EntryKind(row.kind), row.amount, row.rollout_id, row.note)
