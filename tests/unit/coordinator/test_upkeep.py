from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from coordinator import actions
from coordinator.config import StorageSection
from coordinator.scheduling import Scheduling
from coordinator.store import database
from coordinator.store import tables as t
from coordinator.upkeep import Live, count_what_is_over, forget_payloads, sweep, watch_certificate
from protocol.signing import Identity
from tests.stored_run import StoredRun, rejected

PATIENCE_S = 120.0
Begin = Callable[..., Awaitable[StoredRun]]


async def act(run: StoredRun, action: str, **arguments: str) -> str:
    async with run.db.write() as connection:
        at = await database.now(connection)
        return await actions.perform(connection, action, arguments, actor="somebody", at=at)


async def test_a_knob_reaches_those_who_go_by_it(run: StoredRun) -> None:
    used: list[Scheduling] = []
    live = Live(run.db, run.scheduling, used.append)
    await live.refresh()
    assert used == []
    await act(run, "set", name="max_staleness", value="3")
    await act(run, "drain")
    await live.refresh()
    await live.refresh()
    assert used == [replace(run.scheduling, max_staleness=3, draining=True)] == [live.scheduling]


async def test_a_run_that_drains_ends_its_groups_and_begins_none(begin: Begin, alice: Identity) -> None:
    run = await begin(lease_term_s=50_000.0)  # however slow this machine is
    (begun,) = await run.lease(alice, 1)
    run.leasing.use(replace(run.scheduling, draining=True))
    granted = await run.leasing.acquire(alice.key_id, 8)
    assert [sample.group_id for _, sample in granted.leases] == ["g0"]
    assert (await run.leasing.acquire(alice.key_id, 8)).reason == "draining"
    assert (await run.leasing.give_back(alice.key_id, [begun.lease_id])) == 1
    assert len((await run.leasing.acquire(alice.key_id, 8)).leases) == 1
    run.leasing.use(run.scheduling)
    assert (await run.leasing.acquire(alice.key_id, 1)).leases


async def test_housekeeping_frees_leases_forgets_payloads_and_counts_until_told_to_stop(
    run: StoredRun, alice: Identity
) -> None:
    await run.work(alice, 1)
    await run.judge(rejected())
    await run.change(t.rollouts, received_at=1.0)
    lease = await run.lease_one(alice)
    await run.let_lease_expire(lease)
    stop = asyncio.Event()
    live = Live(run.db, run.scheduling, run.leasing.use)
    work = asyncio.gather(
        sweep(run.leasing, live, stop),
        watch_certificate(None, stop),
        forget_payloads(run.db, StorageSection(trained_days=0, rejected_days=0), stop),
        count_what_is_over(run.db, stop),
    )
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while (
        await run.rows(t.payloads)
        or await run.rows(t.leases, t.leases.c.state == "live")
        or not await run.rows(t.tallies)
    ):
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.05)
    stop.set()
    await asyncio.wait_for(work, PATIENCE_S)
