from __future__ import annotations

import asyncio
import itertools

from sqlalchemy import event

from coordinator.dashboard.pool import beside
from coordinator.dashboard.shared import Derived, Shared
from coordinator.operators import Role
from protocol.signing import Identity
from tests.dashboard import bearer, serving
from tests.stored_run import StoredRun


class Made:
    """Makes 1, 2, 3, …; each once it is let."""

    def __init__(self) -> None:
        self.now = 100.0
        self.begun = 0
        self.let = asyncio.Event()
        self.fails = False
        self.shared = Shared(self.make, 2.0, lambda: self.now)

    async def make(self) -> int:
        self.begun += 1
        number = self.begun
        await self.let.wait()
        if self.fails:
            raise OSError(f"failure {number}")
        return number


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_whoever_asks_meanwhile_gets_the_same_and_so_does_who_asks_soon_after() -> None:
    made = Made()
    asked = [asyncio.create_task(made.shared.get()) for _ in range(50)]
    await settle()
    asked[0].cancel()
    made.let.set()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError) and set(answers[1:]) == {1}
    made.now += 1.9
    assert await made.shared.get() == 1
    made.now += 0.2
    assert await made.shared.get() == 2


async def test_a_failure_is_told_to_all_and_not_kept() -> None:
    made = Made()
    made.fails = True
    asked = [asyncio.create_task(made.shared.get()) for _ in range(3)]
    await settle()
    made.let.set()
    assert [str(each) for each in await asyncio.gather(*asked, return_exceptions=True)] == ["failure 1"] * 3
    made.fails = False
    assert await made.shared.get() == 2


async def test_what_was_forgotten_while_it_was_made_is_told_to_nobody_new() -> None:
    made = Made()
    before = asyncio.create_task(made.shared.get())
    await settle()
    made.shared.forget()
    after = asyncio.create_task(made.shared.get())
    await settle()
    made.let.set()
    assert (await before, await after, await made.shared.get()) == (1, 2, 2)


def test_what_is_derived_is_made_again_for_other_objects_alone() -> None:
    numbers = itertools.count(1)
    derived = Derived(lambda first, second: next(numbers))
    one, two = [1], [1]
    assert [derived.of(one, two), derived.of(one, two), derived.of(two, one), derived.of(one, one)] == [1, 1, 2, 3]


async def test_strangers_cost_the_database_nothing_however_many_they_are(run: StoredRun, alice: Identity) -> None:
    statements: list[str] = []

    def note(connection: object, cursor: object, statement: str, *rest: object) -> None:
        statements.append(statement)

    async with serving(run, glance_s=3600.0) as client:
        event.listen(run.db.engine.sync_engine, "before_cursor_execute", note)
        asked = [client.get(path) for path in ("/", "/metrics", "/api/v1/status") * 10]
        assert {answer.status for answer in await asyncio.gather(*asked)} == {200}
        grouped = [each for each in statements if "GROUP BY rollouts.state" in each]
        assert len(grouped) == 1
        before = await (await client.get("/api/v1/status")).json()
        headers = await bearer(run, Role.OPERATOR, "olga")
        done = await client.post("/api/v1/admin/ban", json={"worker": alice.key_id, "reason": "x"}, headers=headers)
        assert done.status == 200
        after = await (await client.get("/api/v1/status")).json()
        assert (before["workers_banned"], after["workers_banned"]) == (0, 1), "what an operator did is seen at once"


async def test_pages_have_connections_of_their_own(run: StoredRun) -> None:
    pages = beside(run.db)
    try:
        assert pages.engine.pool is not run.db.engine.pool
        if not pages.is_sqlite:
            assert pages.engine.pool.size() == 4  # type: ignore[attr-defined]
        async with pages.read(), run.db.read():
            await pages.check()
    finally:
        await pages.close()
