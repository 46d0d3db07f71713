from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from coordinator import verdicts
from coordinator.store import database, rollouts, workers
from coordinator.store import tables as t
from coordinator.verdicts import ALERT_AT_ATTEMPTS, GIVE_UP_AT_ATTEMPTS
from protocol.ledger import BLAMELESS, FRAUD, fold
from protocol.rollout import Outcome, RejectionReason, Verdict
from protocol.signing import Identity
from protocol.wire import floats_from_bytes
from tests.factories import make_tokens
from tests.stored_run import MAX_STRIKES, StoredRun, accepted, inconclusive, rejected

Begin = Callable[..., Awaitable[StoredRun]]


async def alerts(run: StoredRun, action: str) -> list[str]:
    return [row.subject for row in await run.rows(t.events, t.events.c.action == action)]


async def test_an_acceptance_credits_the_verified_tokens_once(run: StoredRun, alice: Identity) -> None:
    (identifier,) = await run.work(alice, 1, tokens=make_tokens(9))
    await run.judge()
    standing = await run.standing(alice)
    assert (standing.credits, standing.accepted, standing.strikes) == (9, 1, 0)
    assert await run.rollout_state(identifier) == "accepted"
    assert await run.sample_state("g0-0") == "accepted"
    assert await run.claim() == [], "what is judged is not judged again"


async def test_a_verdict_keeps_what_the_trainer_needs(run: StoredRun, alice: Identity) -> None:
    await run.work(alice, 1)
    (pending,) = await run.claim()
    verdict = replace(accepted(pending, reward=0.5), metrics={"margin": 0.25, "broken": float("nan")})
    assert await run.record(pending.rollout_id, verdict)
    row = await run.row(t.verdicts)
    assert (row.outcome, row.reward, row.audited, row.metrics) == ("accepted", 0.5, True, {"margin": 0.25})
    assert floats_from_bytes(row.old_logprobs) == (-0.5,) * 6
    assert floats_from_bytes(row.entropies) == (0.25,) * 6


async def test_a_group_is_ready_when_its_last_sample_is_accepted(run: StoredRun, alice: Identity) -> None:
    await run.work(alice, 2)
    first, second = await run.claim()
    await run.record(first.rollout_id, accepted(first))
    assert await run.group_state("g0") == "open"
    await run.record(second.rollout_id, accepted(second))
    assert await run.group_state("g0") == "ready"


async def test_verifiers_that_finish_a_group_at_once_make_it_ready(run: StoredRun, alice: Identity) -> None:
    await run.work(alice, 4)
    pending = [(await run.claim(f"verifier-{i}", limit=1))[0] for i in range(4)]
    written = await asyncio.gather(
        *(run.record(item.rollout_id, accepted(item), f"verifier-{i}") for i, item in enumerate(pending))
    )
    assert written == [True] * 4
    assert [await run.group_state(group) for group in ("g0", "g1")] == ["ready", "ready"]
    assert (await run.standing(alice)).credits == 24, "no credit is lost between them"


@pytest.mark.parametrize("reason", list(RejectionReason))
async def test_what_a_rejection_costs(run: StoredRun, alice: Identity, reason: RejectionReason) -> None:
    (identifier,) = await run.work(alice, 1)
    await run.judge(rejected(reason, "expected this, got that"))
    standing = await run.standing(alice)
    assert standing.strikes == (0 if reason in BLAMELESS else 1)
    assert standing.banned is (reason in FRAUD)
    assert standing.credits == 0
    assert await run.rollout_state(identifier) == "rejected"
    assert await run.sample_state("g0-0") == "waiting", "the sample is leased again"
    assert (await run.drops())[f"rejected:{reason}"] == (1, 6)
    assert (await run.row(t.workers, t.workers.c.worker_id == alice.key_id)).rejected == 1


async def test_enough_strikes_ban(begin: Begin, alice: Identity) -> None:
    run = await begin()
    for strike in range(1, MAX_STRIKES + 1):
        await run.work(alice, 1)
        await run.judge(rejected())
        standing = await run.standing(alice)
        assert (standing.strikes, standing.banned) == (strike, strike == MAX_STRIKES)
    assert "proof: another model" in standing.ban_reason


async def test_a_ban_revokes_purges_and_reopens(run: StoredRun, alice: Identity, bob: Identity) -> None:
    ready = await run.work(alice, 1) + await run.work(bob, 1)  # g0, complete
    await run.judge()
    assert await run.group_state("g0") == "ready"
    pending, fraud = await run.lease(alice, 2)  # g1
    waits = await run.submit(alice, pending)
    (live,) = await run.lease(alice, 1)
    claimed = await run.claim()
    lie = await run.submit(alice, fraud)
    (item,) = await run.claim()
    await run.record(lie, rejected(RejectionReason.FORM))

    assert (await run.standing(alice)).banned
    assert (await run.row(t.leases, t.leases.c.lease_id == live.lease_id)).state == "revoked"
    assert await run.rollout_state(ready[0]) == "dropped"
    assert await run.rollout_state(waits) == "dropped"
    assert await run.rollout_state(ready[1]) == "accepted", "others keep what is theirs"
    assert await run.group_state("g0") == "open"
    assert await run.sample_state("g0-0") == "waiting"
    assert (await run.drops())["banned"] == (2, 12)
    assert await alerts(run, "ban") == [alice.key_id]
    assert not await run.record(waits, accepted(claimed[0])), "a verdict that comes after the ban counts for nothing"
    assert (await run.standing(alice)).credits == 6, "credits stay: the ledger only grows"
    assert item.rollout_id == lie


async def test_the_purged_sample_goes_to_another_worker_and_the_group_on(
    run: StoredRun, alice: Identity, bob: Identity
) -> None:
    await run.work(alice, 1)
    await run.work(bob, 1)
    await run.judge()
    (lease,) = await run.lease(alice, 1)
    await run.submit(alice, lease)
    await run.judge(rejected(RejectionReason.SIGNATURE))
    assert (await run.lease_one(bob)).sample_id == "g0-0"


async def test_inconclusive_is_never_an_acceptance(run: StoredRun, alice: Identity) -> None:
    (identifier,) = await run.work(alice, 1)
    await run.judge(inconclusive())
    assert await run.rollout_state(identifier) == "pending"
    assert await run.rows(t.verdicts) == []
    assert (await run.standing(alice)).credits == 0
    assert (await run.standing(alice)).strikes == 0


async def test_inconclusive_alerts_at_two_and_is_given_up_at_five(run: StoredRun, alice: Identity) -> None:
    (identifier,) = await run.work(alice, 1)
    for attempt in range(1, GIVE_UP_AT_ATTEMPTS + 1):
        assert await run.rollout_state(identifier) == "pending"
        await run.change(t.rollouts, claim_deadline=1.0)
        assert await run.judge(inconclusive()) == [identifier]
        assert await run.claim() == [], "not again at once: what fails now would fail five times within a second"
        assert len(await alerts(run, "inconclusive")) == max(0, attempt - ALERT_AT_ATTEMPTS + 1)
    assert await run.rollout_state(identifier) == "dropped"
    assert await run.drops() == {"inconclusive": (1, 6)}
    assert await run.sample_state("g0-0") == "waiting"
    assert (await run.standing(alice)).strikes == 0, "a failure of ours is never the worker's"
    assert await run.claim() == []


async def test_words_that_no_database_holds_take_no_other_verdict_along(
    run: StoredRun, alice: Identity, bob: Identity
) -> None:
    """An environment that fails may quote what a worker wrote."""
    (quoted,) = await run.work(alice)
    (cheated,) = await run.work(bob)
    await run.claim()
    await run.let_claims_expire()
    await run.claim()
    failed = Verdict(Outcome.INCONCLUSIVE, detail="scoring failed: what is \0 or \ud800?")
    await run.record_all({quoted: failed, cheated: rejected(detail="\0")})
    assert (await run.rollout_state(quoted), await run.rollout_state(cheated)) == ("pending", "rejected")
    (event,) = await run.rows(t.events, t.events.c.action == "inconclusive")
    assert event.detail == "attempt 2: scoring failed: what is \N{REPLACEMENT CHARACTER} or ??"


async def test_a_verifier_without_the_claim_cannot_write(run: StoredRun, alice: Identity) -> None:
    (identifier,) = await run.work(alice, 1)
    (pending,) = await run.claim("verifier-1")
    for verdict in (accepted(pending), rejected(), inconclusive()):
        assert not await run.record(identifier, verdict, "verifier-2")
        assert not await run.record("sha256:unknown", verdict, "verifier-1")
    assert await run.rollout_state(identifier) == "verifying"
    assert await run.record(identifier, accepted(pending), "verifier-1")
    assert not await run.record(identifier, rejected(), "verifier-1"), "a verdict is final"
    assert (await run.standing(alice)).strikes == 0


async def test_a_claim_holds_until_it_runs_out_and_is_then_taken_over(run: StoredRun, alice: Identity) -> None:
    (identifier,) = await run.work(alice, 1)
    (pending,) = await run.claim("verifier-1")
    assert await run.claim("verifier-2") == []
    await run.let_claims_expire()
    (again,) = await run.claim("verifier-2")
    assert (again.rollout_id, again.attempts) == (identifier, 2)
    assert not await run.record(identifier, accepted(pending), "verifier-1"), "the first comes too late"
    assert await run.record(identifier, accepted(again), "verifier-2")
    assert (await run.standing(alice)).credits == 6


async def test_verifiers_side_by_side_never_claim_the_same(run: StoredRun, alice: Identity) -> None:
    await run.work(alice, 8)
    claims = await asyncio.gather(*(run.claim(f"verifier-{i}", limit=3) for i in range(4)))
    identifiers = [pending.rollout_id for claim in claims for pending in claim]
    assert len(identifiers) == len(set(identifiers)) == 8


async def test_a_claim_brings_what_our_side_knows(run: StoredRun, alice: Identity) -> None:
    granted = await run.leasing.acquire(alice.key_id, 1)
    ((lease, sample),) = granted.leases
    await run.submit(alice, lease)
    (pending,) = await run.claim()
    assert (pending.prompt, pending.reference, pending.environment, pending.task_index) == ("0 + 1 =", "1", "sums", 0)
    assert (pending.seed, pending.prompt_token_ids) == (sample.seed, sample.prompt_token_ids)
    assert (pending.worker_id, pending.attempts, pending.newcomer) == (alice.key_id, 1, True)


async def test_a_verdict_after_its_group_went_out_is_credited_and_counted_as_late(
    begin: Begin, alice: Identity, bob: Identity
) -> None:
    run = await begin(min_group=1)
    await run.work(alice, 1)
    await run.judge()
    (late,) = await run.work(bob, 1)
    await run.let_group_expire()
    assert len(await run.pull()) == 1
    await run.judge()
    assert await run.rollout_state(late) == "dropped"
    assert (await run.drops())["late"] == (1, 6)
    assert (await run.standing(bob)).credits == 6


async def test_credits_equal_the_sum_of_ledger_entries(run: StoredRun, alice: Identity, bob: Identity) -> None:
    for worker, length in ((alice, 5), (bob, 7), (alice, 9), (bob, 6)):
        await run.work(worker, 1, tokens=make_tokens(length))
    first, second, third, fourth = await run.claim()
    await run.record(first.rollout_id, accepted(first))
    await run.record(second.rollout_id, rejected())
    await run.record(third.rollout_id, accepted(third))
    await run.record(fourth.rollout_id, rejected(RejectionReason.FORM))
    for worker in (alice, bob):
        async with run.db.read() as connection:
            ledger = await workers.entries(connection, worker.key_id)
        assert await run.standing(worker) == fold(ledger)
    assert (await run.standing(alice)).credits == 14
    assert (await run.standing(bob)).banned


async def test_a_worker_sees_its_latest_verdicts_with_their_reasons(run: StoredRun, alice: Identity) -> None:
    await run.work(alice, 1)
    await run.judge()
    await run.work(alice, 1)
    await run.judge(rejected(RejectionReason.LOGPROB, "median 0.4, at most 0.1"))
    async with run.db.read() as connection:
        newest, oldest = await rollouts.latest_verdicts(connection, alice.key_id, 10)
        assert len(await rollouts.latest_verdicts(connection, alice.key_id, 1)) == 1
    assert (newest.outcome, newest.reason, newest.detail) == ("rejected", "logprob", "median 0.4, at most 0.1")
    assert (oldest.outcome, oldest.reason) == ("accepted", None)


async def test_an_unaudited_acceptance_says_so(run: StoredRun, alice: Identity) -> None:
    await run.work(alice, 1)
    await run.judge(Verdict(Outcome.ACCEPTED, reward=1.0, audited=False))
    row = await run.row(t.verdicts)
    assert (row.audited, bytes(row.old_logprobs)) == (False, b"")


async def give_up(run: StoredRun) -> int:
    async with run.db.write() as connection:
        return await verdicts.give_up(connection, await database.now(connection))


async def test_what_no_verifier_survives_is_looked_at_alone_and_given_up(run: StoredRun, alice: Identity) -> None:
    await run.work(alice, 3)
    for attempt in (1, 2):
        assert len(await run.claim(f"verifier-{attempt}")) == 3
        await run.let_claims_expire()
    poison, *innocent = [pending.rollout_id for _ in range(3) for pending in await run.claim("verifier-3")]
    assert len(innocent) == 2, "one by one"
    for identifier in innocent:
        await run.change(t.rollouts, t.rollouts.c.rollout_id == identifier, state="accepted")
    for _ in range(2):
        await run.let_claims_expire()
        assert await give_up(run) == 0
        (pending,) = await run.claim("verifier-3")
        assert pending.rollout_id == poison
    assert await give_up(run) == 0, "its claim still runs"
    await run.let_claims_expire()
    assert await give_up(run) == 1
    assert await run.rollout_state(poison) == "dropped"
    assert await alerts(run, "inconclusive") == [poison]
    assert (await run.standing(alice)).strikes == 0
