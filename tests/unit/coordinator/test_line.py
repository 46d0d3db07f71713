"""Workers that wait: on a real database, with many of them at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from coordinator.line import Line
from coordinator.service import poll
from coordinator.store import tables as t
from protocol.errors import WorkerFault
from protocol.signing import Identity
from tests.factories import make_identity
from tests.stored_run import StoredRun

Begin = Callable[..., Awaitable[StoredRun]]


async def test_who_needs_not_wait_does_not(run: StoredRun, alice: Identity) -> None:
    granted = await Line(run.leasing).acquire(alice.key_id, 2, 0.0)
    assert len(granted.leases) == 2


async def test_who_waits_in_vain_hears_why(run: StoredRun, alice: Identity) -> None:
    await run.lease(alice, 8)
    begun = time.monotonic()
    granted = await Line(run.leasing).acquire(alice.key_id, 1, 0.6)
    assert (granted.leases, granted.reason) == ((), "capacity")
    assert time.monotonic() - begun >= 0.6


async def test_those_in_line_get_what_becomes_free_the_first_first(run: StoredRun, alice: Identity) -> None:
    crowd = [make_identity(100 + number) for number in range(3)]
    await run.join(*crowd)
    leases = await run.lease(alice, 8)
    line = Line(run.leasing)
    waiting = [asyncio.create_task(line.acquire(worker.key_id, 1, 20.0)) for worker in crowd]
    await asyncio.wait(waiting, timeout=0.5)
    await run.leasing.give_back(alice.key_id, [lease.lease_id for lease in leases[:2]])
    done, still = await asyncio.wait(waiting, timeout=10.0, return_when=asyncio.FIRST_COMPLETED)
    done |= (await asyncio.wait(still, timeout=2.0, return_when=asyncio.FIRST_COMPLETED))[0]
    assert done == set(waiting[:2])
    await run.leasing.give_back(alice.key_id, [leases[2].lease_id])
    assert len((await waiting[2]).leases) == 1


async def test_each_worker_has_one_place_in_line(run: StoredRun, alice: Identity, bob: Identity) -> None:
    leases = await run.lease(alice, 8)
    line = Line(run.leasing)
    calls = [asyncio.create_task(line.acquire(bob.key_id, 1, 20.0)) for _ in range(5)]
    last = calls[-1]
    answers = await asyncio.wait_for(asyncio.gather(*calls[:-1]), 10.0)
    assert [answer.reason for answer in answers] == ["capacity"] * 4
    await run.leasing.give_back(alice.key_id, [leases[0].lease_id])
    assert len((await asyncio.wait_for(last, 10.0)).leases) == 1


async def test_leases_granted_to_somebody_who_has_gone_wait_again(run: StoredRun, alice: Identity) -> None:
    line = Line(run.leasing)
    call = asyncio.create_task(line.acquire(alice.key_id, 3, 20.0))
    for _ in range(3):
        await asyncio.sleep(0)  # the transaction has begun
    call.cancel()
    rows = await poll(lambda: run.rows(t.leases), lambda found: {row.state for row in found} == {"returned"}, 20.0)
    assert len(rows) == 3


async def test_who_is_banned_while_in_line_hears_of_it(run: StoredRun, alice: Identity, bob: Identity) -> None:
    leases = await run.lease(alice, 8)
    call = asyncio.create_task(Line(run.leasing).acquire(bob.key_id, 1, 20.0))
    await asyncio.wait([call], timeout=0.3)
    await run.change(t.workers, t.workers.c.worker_id == bob.key_id, banned=True, ban_reason="forged")
    await run.leasing.give_back(alice.key_id, [leases[0].lease_id])
    with pytest.raises(WorkerFault, match="banned: forged"):
        await call


async def test_who_may_not_have_any_holds_nobody_up(begin: Begin, alice: Identity, bob: Identity) -> None:
    run = await begin(newcomer_share=0.25, probation_rollouts=2)
    newcomers = [make_identity(100 + number) for number in range(70)]
    await run.join(*newcomers)
    await run.change(t.workers, t.workers.c.worker_id == bob.key_id, accepted=2)
    assert len(await run.lease(alice, 2)) == 2, "all that newcomers get"
    taken = await run.lease(bob, 6)
    line = Line(run.leasing)
    waiting = [asyncio.create_task(line.acquire(worker.key_id, 1, 20.0)) for worker in newcomers]
    await asyncio.wait(waiting, timeout=0.3)
    established = asyncio.create_task(line.acquire(bob.key_id, 6, 20.0))
    await asyncio.wait([established], timeout=0.3)
    await run.leasing.give_back(bob.key_id, [lease.lease_id for lease in taken])
    assert len((await established).leases) == 6
    assert not any(task.done() for task in waiting)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
