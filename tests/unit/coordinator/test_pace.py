from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from coordinator.pace import WINDOW_S, Handed, OutLease, Pace, horizon_s, most_leases, pace_of, take_over, too_slow
from coordinator.store import database, pace
from coordinator.store import tables as t
from protocol.signing import Identity
from tests.stored_run import StoredRun

FAST = Pace(rollouts_per_s=1.0, tokens_per_s=10.0, shortest_s=5.0)
STRAGGLER = OutLease("l", "s", age_s=200.0, committed=10, max_tokens=100, group_out=1, group_size=8)


def handed(*newest: tuple[int, float, float], first: float | None = None) -> Handed:
    return Handed(newest, min(received for _, _, received in newest) if first is None else first)


def test_too_little_is_no_pace() -> None:
    one_by_one = [(100, 10.0 * i, 10.0 * i + 10.0) for i in range(8)]
    assert pace_of(handed(*one_by_one[:7])) is None
    assert pace_of(handed(*one_by_one)) == Pace(pytest.approx(0.1), 10.0, 10.0)


def test_a_first_round_says_nothing_of_the_rate() -> None:
    """Hundreds may be under way behind the first eight that come in."""
    first = pace_of(handed(*[(100, 0.0, 10.0 + i / 8) for i in range(8)]))
    assert first is not None and (first.rollouts_per_s, first.shortest_s) == (math.inf, 10.0)
    assert most_leases(first, 40.0) is None and not too_slow(first, 40.0) and too_slow(first, 9.0)


def test_time_without_a_lease_is_not_the_workers() -> None:
    one_by_one = [(100, 1000.0 * i, 1000.0 * i + 10.0) for i in range(8)]
    assert pace_of(handed(*one_by_one)) == Pace(pytest.approx(0.1), 10.0, 10.0)


def test_rounds_of_several_at_once_are_measured_from_one_to_the_next() -> None:
    rounds = [(100, 20.0 * i, 20.0 * i + 20.0) for i in range(4) for _ in range(8)]
    assert pace_of(handed(*rounds)) == Pace(pytest.approx(0.4), 5.0, 20.0)


def test_what_takes_longer_than_is_looked_back_has_a_rate() -> None:
    long = [(100, -2.0 * WINDOW_S + 60.0 * i, 60.0 * i) for i in range(10)]
    found = pace_of(handed(*long))
    assert found is not None and found.rollouts_per_s == pytest.approx(1 / 60)


@pytest.mark.parametrize("at_once", [1, 8, 32, 100, 512])
def test_a_worker_that_is_in_time_is_kept_busy_however_many_it_does_at_once(at_once: int) -> None:
    """Each rollout takes 15 to 25 s and is of use for 32: simulated for ten minutes, measured every 15 s, as granting does."""
    draw, pace, measured_at, held_s = random.Random(at_once), None, -math.inf, 0.0
    done: list[tuple[int, float, float]] = []
    live: list[tuple[float, float]] = []  # (will be received at, was leased at)
    now = 0.0
    while now < 600.0:
        while live and live[0][0] <= now:
            received, leased = heapq.heappop(live)
            done.append((64, leased, received))
        if now >= measured_at + 15.0:
            pace, measured_at = pace_of_all(done), now
        most = most_leases(pace, 32.0)
        assert not too_slow(pace, 32.0)
        for _ in range((at_once if most is None else min(at_once, most)) - len(live)):
            heapq.heappush(live, (now + draw.uniform(15.0, 25.0), now))
        held_s += 0.25 * len(live)
        now += 0.25
    assert held_s / (600.0 * at_once) > 0.95


def pace_of_all(done: Sequence[tuple[int, float, float]]) -> Pace | None:
    """As the store asks, of all that a worker handed in, in its order."""
    if not done:
        return None
    known = Handed(done[-32:], done[0][2])
    if len(known.newest) == 32 and known.span_s < known.mean_s:
        crowd = sum(received > done[-1][2] - known.mean_s for _, _, received in done)
        known = replace(known, crowd=crowd, crowd_s=known.mean_s)
    return pace_of(known)


def test_leases_follow_what_is_finished_in_time() -> None:
    horizon = horizon_s(20.0, 1)
    assert horizon == 40.0
    assert most_leases(FAST, horizon) == 60
    assert most_leases(replace(FAST, rollouts_per_s=0.001), horizon) == 1
    assert most_leases(None, horizon) is most_leases(FAST, None) is None
    assert horizon_s(20.0, 0) is horizon_s(None, 4) is None


def test_a_worker_whose_fastest_comes_too_late_gets_nothing() -> None:
    assert too_slow(replace(FAST, shortest_s=41.0), 40.0)
    assert not too_slow(FAST, 40.0) and not too_slow(None, 40.0) and not too_slow(FAST, None)


def test_a_straggler_near_the_end_of_a_group_is_taken_over() -> None:
    assert take_over([STRAGGLER], FAST, 60.0, 4) == [STRAGGLER]
    nothing_yet = replace(STRAGGLER, committed=0)
    assert take_over([nothing_yet], FAST, 60.0, 4) == [nothing_yet]
    older = replace(STRAGGLER, age_s=300.0, committed=15)
    assert take_over([STRAGGLER, older], FAST, 60.0, 1) == [older]


@pytest.mark.parametrize(
    "change",
    [
        {"age_s": 50.0, "committed": 2},  # not even a term
        {"group_out": 3},  # others hold the group up as well
        {"committed": 95},  # nearly done
        {"age_s": 61.0, "committed": 50, "max_tokens": 1000},  # as fast as we are, or nearly
    ],
)
def test_others_are_left_alone(change: dict[str, float]) -> None:
    assert take_over([replace(STRAGGLER, **change)], FAST, 60.0, 4) == []  # type: ignore[arg-type]


def test_who_was_never_measured_takes_nothing_over() -> None:
    assert take_over([STRAGGLER], None, 60.0, 4) == []


async def measured(run: StoredRun, worker: Identity, count: int = 8) -> None:
    """Let the worker hand in so many, each after about 10 s, over a minute and a half."""
    for _ in range(count):
        await run.work(worker, 1)
    leases = await run.rows(t.leases, t.leases.c.state == "completed")
    for place, lease in enumerate(leases):
        received = leases[0].acquired_at - 10.0 * place
        mine = t.rollouts.c.lease_id == lease.lease_id
        await run.change(t.rollouts, mine, received_at=received)
        await run.change(t.leases, t.leases.c.lease_id == lease.lease_id, acquired_at=received - 10.0)


async def test_a_slow_groups_last_sample_goes_to_a_faster_worker(begin: object, alice: Identity, bob: Identity) -> None:
    run: StoredRun = await begin(group_size=2, groups_per_batch=8, lease_term_s=50_000.0)  # type: ignore[operator]
    (slow,) = await run.lease(bob, 1)
    await measured(run, alice, 9)
    await run.change(t.leases, t.leases.c.lease_id == slow.lease_id, acquired_at=1.0)
    taken = await run.lease(alice, 1)
    assert [lease.sample_id for lease in taken] == [slow.sample_id]
    old = await run.row(t.leases, t.leases.c.lease_id == slow.lease_id)
    assert old.state == "revoked"
    renewals, _ = await run.leasing.renew(bob.key_id, [(slow.lease_id, slow.commitment)])
    assert renewals[0].problem
    assert [row.action for row in await run.rows(t.events) if row.actor == "coordinator"] == ["take_over"]


async def test_leases_are_sized_to_a_workers_speed(begin: object, alice: Identity) -> None:
    run: StoredRun = await begin(group_size=2, groups_per_batch=16, lease_term_s=50_000.0)  # type: ignore[operator]
    await measured(run, alice)
    await run.step(0)
    await run.step(1)
    first = t.steps.c.batch == 0
    soon = (await run.row(t.steps, t.steps.c.batch == 1)).reported_at + 1000.0
    await run.change(t.steps, t.steps.c.batch == 1, reported_at=soon)
    await run.change(t.steps, first, reported_at=soon - 10.0)
    # A rollout every 10 s, 20 s until it is too old: three at once, with room to get faster.
    assert len((await run.leasing.acquire(alice.key_id, 30)).leases) == 3
    assert (await run.leasing.acquire(alice.key_id, 30)).reason == "speed"
    await run.change(t.steps, first, reported_at=soon - 2.0)
    assert (await run.leasing.acquire(alice.key_id, 30)).reason == "too slow"
    # The trainer waits: then there is time.
    await run.change(t.steps, first, reported_at=1.0)
    await run.change(t.steps, t.steps.c.batch == 1, reported_at=3.0)
    assert (await run.leasing.acquire(alice.key_id, 30)).leases


async def test_each_is_measured_by_its_own_newest_of_late(
    begin: object, alice: Identity, bob: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: StoredRun = await begin(group_size=2, groups_per_batch=16)  # type: ignore[operator]
    await measured(run, alice, 12)
    async with run.db.read() as connection:
        at = await database.now(connection)
        found = await pace.of_workers(connection, [bob.key_id, alice.key_id, "nobody"], at)
        mine = found.pop(alice.key_id)
        assert mine is not None and (mine.rollouts_per_s, mine.shortest_s) == (pytest.approx(0.1), pytest.approx(10.0))
        assert found == {bob.key_id: None, "nobody": None}
        monkeypatch.setattr(pace, "_ROLLOUTS", 7)
        assert await pace.of_workers(connection, [alice.key_id], at) == {alice.key_id: None}, "of 7 rollouts"
        monkeypatch.undo()
        later = at + WINDOW_S - 45.0
        assert await pace.of_workers(connection, [alice.key_id], later) == {alice.key_id: None}, "most are too old"
        assert await pace.of_workers(connection, [], at) == {}


async def test_a_crowd_is_counted(begin: object, alice: Identity, bob: Identity) -> None:
    """Of hundreds at once, the newest few are no measure."""
    run: StoredRun = await begin(group_size=2, groups_per_batch=64)  # type: ignore[operator]
    await measured(run, bob, 9)
    crowd = await run.work(alice, 45)
    now = (await run.row(t.rollouts, t.rollouts.c.rollout_id == crowd[0])).received_at
    for place, rollout in enumerate(crowd):  # the last is the first that came; the others came four a second
        received = now - (0.25 * place if place < 44 else 30.0)
        row = await run.row(t.rollouts, t.rollouts.c.rollout_id == rollout)
        await run.change(t.rollouts, t.rollouts.c.rollout_id == rollout, received_at=received)
        await run.change(t.leases, t.leases.c.lease_id == row.lease_id, acquired_at=received - 10.1)
    async with run.db.read() as connection:
        found = await pace.of_workers(connection, [bob.key_id, alice.key_id], await database.now(connection))
    mine, others = found[alice.key_id], found[bob.key_id]
    assert mine is not None and mine.rollouts_per_s == pytest.approx(41 / 10.1)
    assert others is not None and others.rollouts_per_s == pytest.approx(0.1)
