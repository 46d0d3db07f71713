"""Statements of account and the ledger's lines, from one snapshot: what pages, API, commands and statements say is the same."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store import database, workers
from protocol.ledger import Entry, fold
from protocol.statement import Statement, digest_of


async def make(connection: AsyncConnection, run_id: str, worker_id: str) -> tuple[Statement, list[Entry]] | None:
    """The worker's statement, folded from its lines; None if it never registered."""
    if await workers.standing(connection, worker_id) is None:
        return None
    entries = await workers.entries(connection, worker_id)
    standing = fold(entries)
    return (
        Statement(
            run_id=run_id,
            worker_id=worker_id,
            credits=standing.credits,
            strikes=standing.strikes,
            accepted=standing.accepted,
            banned=standing.banned,
            entries=len(entries),
            entries_digest=digest_of(entries),
            as_of_ms=int(await database.now(connection) * 1000),
        ),
        entries,
    )
