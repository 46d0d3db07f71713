"""Evidence in the database: added with the verdict, watched, alarmed, acted on, pardoned."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from coordinator import operate
from coordinator.store import tables as t
from coordinator.verification.pooled import (
    ALERT,
    COMPARISONS,
    GIVEN_UP,
    NEAR_TIE,
    NEAR_TIES,
    NEAR_TIES_LOST,
    PROOF_MANTISSA,
    REWARD_HIGH,
    STRIKE,
    Pooled,
    PooledClass,
    PooledTest,
)
from protocol.lease import Commitment
from protocol.signing import Identity
from protocol.wire import rollout_id
from tests.factories import make_identity
from tests.stored_run import StoredRun, accepted, rejected

Begin = Callable[..., Awaitable[StoredRun]]


def pooled(action: str = STRIKE, *, alpha: float = 1.0) -> Pooled:
    """One numeric test that alarms after few observations, and the comparisons."""
    test = PooledTest(PROOF_MANTISSA, action, alpha, (PooledClass(1, 0.0, 1.0, 8.0),))
    return replace(COMPARISONS, observations_per_month=20.0, tests=(test, *COMPARISONS.tests))


async def judge(run: StoredRun, value: float, **changes: object) -> None:
    """Accept everything that waits, with this observation."""
    for pending in await run.claim():
        verdict = replace(accepted(pending), observations={PROOF_MANTISSA: value}, **changes)  # type: ignore[arg-type]
        assert await run.record(pending.rollout_id, verdict)


async def numeric(run: StoredRun, worker: Identity) -> list[object]:
    mine = (t.evidence.c.worker_id == worker.key_id) & (t.evidence.c.test == PROOF_MANTISSA)
    return await run.rows(t.evidence, mine)


async def actions(run: StoredRun) -> list[str]:
    return [row.action for row in await run.rows(t.events) if row.action not in ("version", "established")]


async def test_an_audited_acceptance_adds_evidence(run: StoredRun, alice: Identity) -> None:
    run.pooled = pooled()
    for _ in range(2):
        await run.work(alice, 1)
        await judge(run, 0.5)
    (row,) = await numeric(run, alice)
    assert (row.rollouts, row.tokens, row.alarmed_at) == (2, 12, None)  # type: ignore[attr-defined]
    assert row.log_e > 0.0 and len(row.bets) == 4  # type: ignore[attr-defined]
    assert (await run.rows(t.verdicts))[0].observations == {PROOF_MANTISSA: 0.5}


async def test_what_is_not_audited_or_rejected_adds_none(run: StoredRun, alice: Identity) -> None:
    run.pooled = pooled()
    await run.work(alice, 1)
    await judge(run, 8.0, audited=False)
    await run.work(alice, 1)
    await run.judge(replace(rejected(), observations={PROOF_MANTISSA: 8.0}))
    assert await numeric(run, alice) == []


async def test_an_alarm_bans_where_the_test_says_so(run: StoredRun, alice: Identity, bob: Identity) -> None:
    run.pooled = pooled()
    await run.work(bob, 1)
    await judge(run, 0.5)
    submitted = []
    for _ in range(3):
        submitted += await run.work(alice, 1)
        await judge(run, 8.0)
        if (await run.standing(alice)).banned:
            break
    standing = await run.standing(alice)
    assert standing.banned and standing.strikes == 1
    assert "pooled: proof_mantissa: over 2 observations of 12 tokens" in standing.ban_reason
    assert [await run.rollout_state(each) for each in submitted] == ["dropped", "dropped"], "untrained work is purged"
    assert not (await run.standing(bob)).banned
    assert {"alarm", "strike", "ban"} <= set(await actions(run))


async def test_nobody_is_banned_for_what_most_workers_show(run: StoredRun, alice: Identity, bob: Identity) -> None:
    run.pooled = pooled()
    carol = make_identity(13)
    await run.join(carol)
    await run.work(alice, 1)
    await run.work(bob, 1)
    await judge(run, 3.0)
    for _ in range(3):
        await run.work(carol, 1)
        await judge(run, 8.0)
    assert not (await run.standing(carol)).banned
    details = [row.detail for row in await run.rows(t.events, t.events.c.action == "alarm")]
    assert details and all("calibrate again" in detail for detail in details)


async def test_an_alert_tells_the_operator_and_bans_nobody(run: StoredRun, alice: Identity) -> None:
    run.pooled = pooled(ALERT)
    for _ in range(4):
        await run.work(alice, 1)
        await judge(run, 8.0)
    standing = await run.standing(alice)
    assert (standing.banned, standing.strikes) == (False, 0)
    found = await actions(run)
    assert "alarm" in found and found.count("watch") == 1
    (row,) = await numeric(run, alice)
    assert row.alarmed_at is not None  # type: ignore[attr-defined]
    assert (await run.row(t.workers, t.workers.c.worker_id == alice.key_id)).watched, "until it is pardoned"


async def test_much_evidence_watches_and_little_lets_go(run: StoredRun, alice: Identity) -> None:
    run.pooled = pooled(alpha=0.001)
    await run.work(alice, 2)
    await judge(run, 8.0)
    await run.work(alice, 1)
    await judge(run, 8.0)
    await run.work(alice, 1)
    (pending,) = await run.claim()
    assert pending.watched, "it is audited in full"
    verdict = replace(accepted(pending), observations={PROOF_MANTISSA: 0.0})
    assert await run.record(pending.rollout_id, verdict)
    await run.change(t.rollouts, state="trained")
    for _ in range(12):
        await run.work(alice, 1)
        await judge(run, 0.0)
        await run.change(t.rollouts, state="trained")
    assert [action for action in await actions(run) if "watch" in action] == ["watch", "unwatch"]


async def test_a_pardon_forgets_the_evidence(run: StoredRun, alice: Identity, database_url: str) -> None:
    run.pooled = pooled()
    for _ in range(2):
        await run.work(alice, 1)
        await judge(run, 8.0)
    assert (await run.standing(alice)).banned
    await operate.set_standing(database_url, alice.key_id, "a bad driver", banned=False)
    assert await run.rows(t.evidence) == []
    assert not (await run.row(t.workers, t.workers.c.worker_id == alice.key_id)).watched
    standing = await run.standing(alice)
    assert (standing.banned, standing.strikes, standing.clean_tokens) == (False, 0, 0)


async def test_clean_tokens_count_since_the_last_strike(run: StoredRun, alice: Identity) -> None:
    await run.work(alice, 2)
    await run.judge()
    assert (await run.standing(alice)).clean_tokens == 12
    await run.work(alice, 1)
    await run.judge(rejected())
    assert (await run.standing(alice)).clean_tokens == 0
    await run.work(alice, 1)
    (pending,) = await run.claim()
    assert pending.clean_tokens == 0
    await run.record(pending.rollout_id, accepted(pending))
    assert ((await run.standing(alice)).clean_tokens, (await run.standing(alice)).credits) == (6, 18)


async def test_every_change_of_class_is_an_audit_event(begin: Begin, alice: Identity) -> None:
    run = await begin(probation_rollouts=2)
    await run.work(alice, 3)
    await run.judge()
    await run.work(alice, 1)
    await run.judge(rejected())
    found = [(row.action, row.subject) for row in await run.rows(t.events) if row.action != "version"]
    assert found == [("established", alice.key_id), ("strike", alice.key_id)]


async def test_a_complete_group_is_compared_once(run: StoredRun, alice: Identity, bob: Identity) -> None:
    mine, theirs = await run.work(alice, 1), await run.work(bob, 1)
    for pending in await run.claim():
        reward = 1.0 if pending.worker_id == alice.key_id else 0.0
        metrics = {NEAR_TIES: 1.0, NEAR_TIES_LOST: float(reward)}
        assert await run.record(pending.rollout_id, replace(accepted(pending, reward), metrics=metrics))
    rows = await run.rows(t.evidence, t.evidence.c.worker_id == alice.key_id)
    assert {row.test: row.rollouts for row in rows} == {NEAR_TIE: 1, REWARD_HIGH: 1, "reward_low": 1}
    assert {row.tokens for row in rows} == {6}
    (high,) = [row for row in rows if row.test == REWARD_HIGH]
    (low,) = [row for row in rows if row.test == "reward_low"]
    assert high.log_e > low.log_e
    # The group is opened again by a ban, and completed by another: it says nothing new about Alice.
    await run.change(t.samples, t.samples.c.sample_id == "g0-1", state="waiting")
    await run.change(t.groups, t.groups.c.group_id == "g0", state="open")
    await run.change(t.rollouts, t.rollouts.c.rollout_id == theirs[0], state="dropped")
    again = await run.lease_one(alice)
    envelope = run.envelope(alice, again)
    await run.intake.submit(alice.key_id, envelope)
    await run.judge()
    assert await run.group_state("g0") == "ready"
    assert rollout_id(envelope.payload) != mine[0]
    rows = await run.rows(t.evidence, t.evidence.c.worker_id == alice.key_id)
    assert {row.rollouts for row in rows} == {1}


@pytest.mark.parametrize("returned", [True, False], ids=["returned", "ended by a report that can't be"])
async def test_what_a_worker_gave_up_counts_when_others_finished_it(
    run: StoredRun, alice: Identity, bob: Identity, returned: bool
) -> None:
    await run.work(bob, 2)
    await run.judge()  # a first group, with reward 1: what is usual
    lease = await run.lease_one(alice)
    if returned:
        await run.leasing.give_back(alice.key_id, [lease.lease_id])
    else:
        await run.leasing.renew(alice.key_id, [(lease.lease_id, Commitment(1 << 20, bytes(32)))])
    await run.work(bob, 2)
    for pending in await run.claim():
        assert await run.record(pending.rollout_id, accepted(pending, 0.0))
    (row,) = await run.rows(t.evidence, t.evidence.c.worker_id == alice.key_id)
    assert (row.test, row.rollouts) == (GIVEN_UP, 1) and row.log_e > 0.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_an_observation_that_is_no_number_is_left_out(run: StoredRun, alice: Identity, value: float) -> None:
    run.pooled = pooled()
    await run.work(alice, 1)
    await judge(run, value)
    assert await numeric(run, alice) == []
