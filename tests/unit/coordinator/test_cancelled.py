"""A caller that is cancelled in the middle of a write, as by a trainer that is killed, leaves no lock behind."""

from __future__ import annotations

import asyncio
import random

from coordinator.store import events
from coordinator.store import tables as t
from coordinator.store.database import Lane
from tests.stored_run import StoredRun

PATIENCE_S = 20.0


async def _write(run: StoredRun, lines: int) -> None:
    rows = [{"at": 1.0, "actor": "a", "action": "many", "subject": str(i), "detail": "x" * 200} for i in range(lines)]
    async with run.db.write(Lane.ROWS) as connection:
        await connection.execute(t.events.insert(), rows)
        await events.record(connection, at=1.0, actor="a", action="last", subject="", detail="")


async def test_a_write_that_is_cancelled_at_any_moment_holds_up_nobody(sqlite_url: str) -> None:
    run = await StoredRun.begin(sqlite_url)
    draw, errors = random.Random(0), []
    for _ in range(24):
        writing = asyncio.create_task(_write(run, 2000))
        await asyncio.sleep(draw.uniform(0.0, 0.05))
        writing.cancel()
        # Kept, as a log keeps them: an error refers to what was under way.
        errors += await asyncio.gather(writing, return_exceptions=True)
        async with asyncio.timeout(PATIENCE_S):
            await _write(run, 1)
    whole = sum(error is None for error in errors)
    assert all(error is None or isinstance(error, asyncio.CancelledError) for error in errors), errors
    assert len(await run.rows(t.events, t.events.c.action == "last")) >= 24 + whole, "what was not cancelled is there"
    assert whole < 24
    await run.db.close()
