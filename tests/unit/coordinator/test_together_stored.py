"""Several submissions, leases, renewals and verdicts in one transaction: each as if it were alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from coordinator.acceptance import record_all
from coordinator.granting import Request
from coordinator.scheduling import SERVING
from coordinator.store import database
from coordinator.store import tables as t
from coordinator.verdicts import Rules
from protocol.declaration import BF16
from protocol.errors import WorkerFault
from protocol.lease import Commitment
from protocol.rollout import token_digest
from protocol.signing import Identity, SignedEnvelope
from tests.factories import make_identity, make_tokens
from tests.stored_run import MAX_STRIKES, VERIFIER, StoredRun, accepted, inconclusive, rejected

Begin = Callable[..., Awaitable[StoredRun]]


async def test_submissions_at_once_are_received_or_refused_each_for_itself(
    run: StoredRun, alice: Identity, bob: Identity
) -> None:
    mine, stolen, twice = await run.lease(alice, 3)
    again = run.envelope(alice, twice)
    calls = [
        run.intake.submit(alice.key_id, run.envelope(alice, mine)),
        run.intake.submit(bob.key_id, run.envelope(bob, stolen)),
        run.intake.submit(alice.key_id, again),
        run.intake.submit(alice.key_id, again),
        run.intake.submit(alice.key_id, run.envelope(alice, twice, tokens=make_tokens(9))),
    ]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(answers[0], SignedEnvelope)
    assert isinstance(answers[1], WorkerFault) and "another worker's" in answers[1].detail
    assert isinstance(answers[2], SignedEnvelope) and answers[2] == answers[3], "the same bytes, the same receipt"
    assert isinstance(answers[4], WorkerFault) and "completed" in answers[4].detail
    assert len(await run.rows(t.rollouts)) == len(await run.rows(t.payloads)) == 2


async def test_leases_for_several_at_once_are_what_they_would_get_in_turn(begin: Begin) -> None:
    run = await begin(groups_per_batch=4, max_staleness=0, newcomer_share=0.75, probation_rollouts=1)
    crowd = [make_identity(100 + number) for number in range(4)]
    await run.join(*crowd)
    answers = await run.leasing.acquire_many(
        [*(Request(worker.key_id, 3) for worker in crowd), Request(make_identity(99).key_id, 1)]
    )
    granted = [answer for answer in answers if not isinstance(answer, WorkerFault)]
    assert [len(each.leases) for each in granted] == [3, 3, 0, 0], "three quarters of eight for newcomers"
    assert [each.reason for each in granted] == ["", "", "newcomers", "newcomers"]
    assert isinstance(answers[4], WorkerFault)
    samples = [sample.sample_id for each in granted for _, sample in each.leases]
    assert samples == ["g0-0", "g0-1", "g1-0", "g1-1", "g2-0", "g2-1"]
    assert {row.state for row in await run.rows(t.samples)} == {"leased"}


async def test_serving_from_what_is_remembered_keeps_to_the_capacity(begin: Begin) -> None:
    run = await begin(freshness=SERVING)
    crowd = [make_identity(100 + number) for number in range(6)]
    await run.join(*crowd)
    granted = [await run.leasing.acquire(worker.key_id, 3) for worker in crowd]
    assert [len(each.leases) for each in granted] == [3, 3, 2, 0, 0, 0]
    assert granted[-1].reason == "capacity"


async def test_renewals_of_several_workers_are_kept_apart(run: StoredRun, alice: Identity, bob: Identity) -> None:
    (first,), (second,) = await run.lease(alice, 1), await run.lease(bob, 1)
    tokens = Commitment(3, token_digest((1, 2, 3)), 0)
    ours, theirs = await asyncio.gather(
        run.leasing.renew(alice.key_id, [(first.lease_id, tokens), (second.lease_id, tokens)]),
        run.leasing.renew(bob.key_id, [(second.lease_id, Commitment())]),
    )
    assert [renewal.problem for renewal in ours[0]] == ["", "there is no such lease of yours"]
    assert [renewal.problem for renewal in theirs[0]] == [""]
    lengths = {row.lease_id: row.committed_length for row in await run.rows(t.leases)}
    assert lengths == {first.lease_id: 3, second.lease_id: 0}


async def test_verdicts_at_once_do_what_each_does_alone(begin: Begin, alice: Identity, bob: Identity) -> None:
    run = await begin(probation_rollouts=2)
    await run.work(alice, 3)
    (doubtful,) = await run.work(bob, 1)
    claimed = await run.claim()
    found = {pending.rollout_id: accepted(pending) for pending in claimed}
    bad = next(pending.rollout_id for pending in claimed if pending.rollout.sample_id == "g1-0")
    found |= {bad: rejected(), doubtful: inconclusive(), "sha256:unknown": rejected()}
    async with run.db.write() as connection:
        at = await database.now(connection)
        rules = Rules(MAX_STRIKES, 2, {BF16: run.pooled})
        assert await record_all(connection, found, verifier=VERIFIER, at=at, rules=rules) == 4
        assert await record_all(connection, found, verifier="another", at=at, rules=rules) == 0
    states = {row.sample_id: row.state for row in await run.rows(t.rollouts)}
    assert states == {"g0-0": "accepted", "g0-1": "accepted", "g1-0": "rejected", "g1-1": "pending"}
    assert (await run.group_state("g0"), await run.group_state("g1")) == ("ready", "open")
    standing = await run.standing(alice)
    assert (standing.accepted, standing.strikes) == (2, 1)
    assert standing.credits == sum(row.amount for row in await run.rows(t.ledger, t.ledger.c.kind == "credit"))
    assert [row.action for row in await run.rows(t.events, t.events.c.action == "established")] == ["established"]


@pytest.mark.parametrize("together", [True, False])
async def test_what_comes_too_late_for_its_group_is_credited_and_not_trained_on(
    run: StoredRun, alice: Identity, together: bool
) -> None:
    await run.work(alice, 2)
    claimed = await run.claim()
    await run.change(t.groups, t.groups.c.group_id == "g0", state="dropped")
    some = [claimed] if together else [[each] for each in claimed]
    for each in some:
        async with run.db.write() as connection:
            await record_all(
                connection,
                {pending.rollout_id: accepted(pending) for pending in each},
                verifier=VERIFIER,
                at=await database.now(connection),
                rules=Rules(MAX_STRIKES, 2, {BF16: run.pooled}),
            )
    assert {row.state for row in await run.rows(t.rollouts)} == {"dropped"}
    assert (await run.standing(alice)).accepted == 2
    assert (await run.drops())["late"][0] == 2
