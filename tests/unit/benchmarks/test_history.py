"""benchmarks.history: what it writes is a history that the product could have made, and each question finds it."""

from __future__ import annotations

import time

from sqlalchemy import func, select

from benchmarks import history
from coordinator.migrate import upgrade
from coordinator.store import browse, summary
from coordinator.store import tables as t
from coordinator.store.database import Database
from demo.postgres import Postgres

_SIZE = 8192


async def test_a_history_is_as_large_as_it_says_and_answers_every_question(postgres: Postgres) -> None:
    url, end = postgres.create("history"), time.time()
    try:
        await upgrade(url)
        await history.write_history(url, _SIZE, end)
        found = await history.measure(url, 1, end)
        assert set(found) == set(history.questions(end)) and all(ms > 0 for ms in found.values())
        db = Database.open(url)
        async with db.read() as connection:
            view = await summary.read(connection)
            sums = await browse.ledger_sums(connection)
            kept = (await connection.execute(select(func.sum(t.tallies.c.amount)))).scalar_one()
        await db.close()
    finally:
        postgres.drop("history")
    assert sum(view.rollouts.values()) == _SIZE and view.rollouts["rejected"] == len(range(0, _SIZE, 100))
    assert view.rejections == {"rejected:proof": view.rollouts["rejected"]}
    assert sums == {"credit": 64 * (_SIZE - view.rollouts["rejected"]), "strike": 64 * view.rollouts["rejected"]}
    assert kept > 0, "nothing was counted for good"
    assert view.max_staleness_seen == 2 and view.head_version == _SIZE // 1024
