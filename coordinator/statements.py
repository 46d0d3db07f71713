"""Statements of account and the ledger's lines, from one snapshot: what pages, API, commands and statements say is the same."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store import database, workers
from protocol.ledger import Entry, fold
from protocol.statement import Statement, digest_of


async def make(connection: AsyncConnection, run_id: str, worker_id: str) -> tuple[Statement, list[Entry]] | None:
    """The worker's statement, folded from its lines; None if it never registered."""
    if await workers.standing(connection, worker_id) is None:
        return None
    entries = await workers.entries(connection, worker_id)
    return account(run_id, worker_id, entries, await database.now(connection)), entries


def account(run_id: str, worker_id: str, entries: Sequence[Entry], as_of: float) -> Statement:
    """What these lines, all of the worker's in order, amount to. `as_of`: Unix seconds by the database's clock. Pure."""
    standing = fold(entries)
    return Statement(
        run_id=run_id,
        worker_id=worker_id,
        credits=standing.credits,
        strikes=standing.strikes,
        accepted=standing.accepted,
        banned=standing.banned,
        entries=len(entries),
        entries_digest=digest_of(entries),
        as_of_ms=int(as_of * 1000),
    )
