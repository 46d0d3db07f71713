"""Versions that turned out bad: their numbers stay taken, and nothing that they made is trained on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from coordinator.store import tables as t
from protocol.errors import UserError, WorkerFault
from protocol.rollout import RejectionReason
from protocol.signing import Identity
from tests.stored_run import StoredRun

Begin = Callable[..., Awaitable[StoredRun]]


async def test_numbers_stay_taken(begin: Begin) -> None:
    run = await begin(versions=4)
    done = await run.feeding.withdraw(1)
    assert (done.next_version, done.next_batch, done.withdrawn, done.purged) == (4, 0, 2, 0)
    head, _ = await run.feeding.state()
    assert head.version == 1
    for version in (2, 3):
        with pytest.raises(UserError, match="withdrawn"):
            await run.announce(version)
    assert await run.announce(4) == 4
    again = await run.feeding.withdraw(1)
    assert (again.next_version, again.withdrawn) == (5, 1), "what came since is withdrawn with it"


async def test_repeating_it_changes_nothing(begin: Begin, alice: Identity) -> None:
    run = await begin(versions=3)
    first = await run.feeding.withdraw(1)
    again = await run.feeding.withdraw(1)
    assert (again.next_version, again.next_batch) == (first.next_version, first.next_batch)
    assert (again.withdrawn, again.purged) == (0, 0)
    assert [event.action for event in await run.rows(t.events)].count("withdraw") == 1


@pytest.mark.parametrize("version", [3, 9])
async def test_one_can_only_go_back_to_what_is_there(begin: Begin, version: int) -> None:
    run = await begin(versions=4)
    await run.feeding.withdraw(2)
    with pytest.raises(UserError, match=f"version {version}"):
        await run.feeding.withdraw(version)


async def test_what_was_made_with_them_is_purged_and_made_again(begin: Begin, alice: Identity) -> None:
    run = await begin(versions=3)
    await run.work(alice, 2, **made_with(run, 2))
    await run.judge()
    done = await run.feeding.withdraw(1)
    assert done.purged == 2
    assert await run.pull(version=1) == []
    states = [(row.state, row.drop_reason) for row in await run.rows(t.rollouts)]
    assert states == [("dropped", "withdrawn")] * 2
    assert {row.state for row in await run.rows(t.samples) if row.group_id == "g0"} == {"waiting"}


async def test_what_older_versions_made_stays(begin: Begin, alice: Identity) -> None:
    run = await begin(versions=3)
    await run.work(alice, 2, **made_with(run, 1))
    await run.judge()
    assert (await run.feeding.withdraw(1)).purged == 0
    assert len(await run.pull(version=1)) == 1


async def test_a_batch_that_no_checkpoint_holds_is_closed(begin: Begin, alice: Identity) -> None:
    run = await begin(versions=3)
    await run.work(alice, 2, **made_with(run, 2))
    await run.judge()
    assert len(await run.pull(batch=5, version=2)) == 1
    done = await run.feeding.withdraw(1)
    assert (done.next_batch, done.purged) == (6, 2)
    with pytest.raises(UserError, match="acknowledged"):
        await run.pull(batch=5, version=1)


async def test_steps_that_no_version_came_of_are_taken_back_like_others(begin: Begin, alice: Identity) -> None:
    """Their batch's numbers stay taken, so that the trainer acknowledges it with the next: nothing of it was trained on."""
    run = await begin(versions=2)
    await run.work(alice, 2, **made_with(run, 1))
    await run.judge()
    assert len(await run.pull(batch=5, version=1)) == 1
    for purged in (2, 0):
        done = await run.feeding.withdraw(1)
        assert (done.next_version, done.next_batch, done.withdrawn, done.purged) == (2, 6, 0, purged)
    assert await run.feeding.acknowledge(done.next_batch - 1) == 0
    assert [(row.state, row.drop_reason) for row in await run.rows(t.rollouts)] == [("dropped", "withdrawn")] * 2
    assert (await run.drops())["withdrawn"][0] == 2
    assert [event.action for event in await run.rows(t.events)].count("withdraw") == 1


async def test_who_was_working_is_not_to_blame(begin: Begin, alice: Identity) -> None:
    run = await begin(versions=3)
    await run.feeding.withdraw(1)
    with pytest.raises(WorkerFault) as caught:
        await run.work(alice, 1, **made_with(run, 2))
    assert caught.value.reason == RejectionReason.STALE


def made_with(run: StoredRun, version: int) -> dict[str, Any]:
    """Keywords of a rollout made by one version."""
    return {"versions": (version,)}
