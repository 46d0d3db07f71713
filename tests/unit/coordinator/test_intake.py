from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from coordinator.store import tables as t
from protocol.errors import BadSignature, WorkerFault
from protocol.lease import Commitment, Lease
from protocol.rollout import RejectionReason, Rollout, Segment, token_digest
from protocol.signing import RECEIPT, ROLLOUT, Identity, open_envelope
from protocol.wire import rollout_id, rollout_to_payload
from protos.rollswarm.v1 import worker_pb2
from tests.factories import (
    COORDINATOR,
    EOS,
    RUN_ID,
    make_identity,
    make_rollout,
    make_tokens,
    make_turns_rollout,
    sign_rollout,
)
from tests.stored_run import MAX_STRIKES, StoredRun, accepted, rejected
from tests.turns import make_sums

Begin = Callable[..., Awaitable[StoredRun]]
REWARD_99 = bytes([0x99, 0x06]) + bytes(8)  # field 99, a double


async def refused(run: StoredRun, worker: Identity, envelope) -> WorkerFault:  # type: ignore[no-untyped-def]
    with pytest.raises(WorkerFault) as caught:
        await run.intake.submit(worker.key_id, envelope)
    return caught.value


async def test_a_receipt_names_run_rollout_and_sample_and_is_signed(run: StoredRun, alice: Identity) -> None:
    lease = await run.lease_one(alice)
    envelope = run.envelope(alice, lease)
    signed = await run.intake.submit(alice.key_id, envelope)
    receipt = worker_pb2.Receipt.FromString(open_envelope(signed, RECEIPT, pinned=(COORDINATOR.key_id,)))
    assert (receipt.run_id, receipt.sample_id) == (RUN_ID, lease.sample_id)
    assert receipt.rollout_id == rollout_id(envelope.payload)
    assert receipt.received_at_ms > 1_500_000_000_000


async def test_what_is_received_waits_for_its_verdict(run: StoredRun, alice: Identity) -> None:
    lease = await run.lease_one(alice)
    identifier = await run.submit(alice, lease, tokens=make_tokens(9))
    row = await run.row(t.rollouts)
    assert (row.rollout_id, row.state, row.tokens, row.oldest_version) == (identifier, "pending", 9, 0)
    assert (await run.row(t.leases)).state == "completed"
    assert await run.sample_state(lease.sample_id) == "submitted"


async def test_the_bytes_are_kept_as_they_came(run: StoredRun, alice: Identity) -> None:
    lease = await run.lease_one(alice)
    envelope = run.envelope(alice, lease)
    await run.intake.submit(alice.key_id, envelope)
    (pending,) = await run.claim()
    assert pending.rollout == make_rollout(lease.lease_id, lease.sample_id)
    row = await run.row(t.payloads)
    assert (row.key_id, bytes(row.signature)) == (envelope.key_id, envelope.signature)


async def test_the_same_bytes_get_the_same_receipt_whatever_happened_since(run: StoredRun, alice: Identity) -> None:
    lease = await run.lease_one(alice)
    envelope = run.envelope(alice, lease)
    first = await run.intake.submit(alice.key_id, envelope)
    assert await run.intake.submit(alice.key_id, envelope) == first
    await run.judge()
    assert await run.intake.submit(alice.key_id, envelope) == first
    assert len(await run.rows(t.rollouts)) == 1
    assert (await run.standing(alice)).credits == 6


async def test_the_same_bytes_at_once_are_one_rollout(run: StoredRun, alice: Identity) -> None:
    envelope = run.envelope(alice, await run.lease_one(alice))
    receipts = await asyncio.gather(*(run.intake.submit(alice.key_id, envelope) for _ in range(5)))
    assert len(set(receipts)) == 1
    assert len(await run.rows(t.rollouts)) == 1


async def test_a_second_rollout_for_the_same_lease_is_refused(run: StoredRun, alice: Identity) -> None:
    lease = await run.lease_one(alice)
    await run.submit(alice, lease)
    fault = await refused(run, alice, run.envelope(alice, lease, tokens=make_tokens(7)))
    assert (fault.reason, fault.detail) == (RejectionReason.LEASE, "the lease is completed")
    assert (await run.standing(alice)).strikes == 0


async def test_two_different_rollouts_at_once_leave_one(run: StoredRun, alice: Identity) -> None:
    lease = await run.lease_one(alice)
    answers = await asyncio.gather(
        *(run.submit(alice, lease, tokens=make_tokens(length)) for length in range(4, 9)), return_exceptions=True
    )
    assert sum(isinstance(answer, str) for answer in answers) == 1
    assert all(isinstance(answer, str | WorkerFault) for answer in answers)
    assert len(await run.rows(t.rollouts)) == 1


async def test_a_replay_under_another_lease_sample_or_run_is_refused(run: StoredRun, alice: Identity) -> None:
    first, second = await run.lease(alice, 2)
    for lease_id, sample_id, run_id in (
        (first.lease_id, second.sample_id, RUN_ID),
        (second.lease_id, first.sample_id, RUN_ID),
        (first.lease_id, first.sample_id, "other-run"),
        ("unknown", first.sample_id, RUN_ID),
    ):
        rollout = make_rollout(lease_id, sample_id, run_id=run_id)
        assert (await refused(run, alice, sign_rollout(rollout, alice))).reason == RejectionReason.LEASE
    assert await run.rows(t.rollouts) == []
    assert (await run.standing(alice)).strikes == 0, "timing and mistakes cost nothing but the work"


async def test_another_workers_lease_is_refused(run: StoredRun, alice: Identity, bob: Identity) -> None:
    lease = await run.lease_one(alice)
    fault = await refused(run, bob, run.envelope(bob, lease))
    assert (fault.reason, fault.detail) == (RejectionReason.LEASE, "the lease is another worker's")
    await run.submit(alice, lease)


async def test_another_workers_rollout_cannot_be_handed_in(run: StoredRun, alice: Identity, bob: Identity) -> None:
    envelope = run.envelope(alice, await run.lease_one(alice))
    fault = await refused(run, bob, envelope)
    assert isinstance(fault, BadSignature)
    for worker in (alice, bob):
        assert (await run.standing(worker)).strikes == 0, "nobody is struck by what another key made"
    await run.intake.submit(alice.key_id, envelope)


async def test_a_forgery_never_strikes_the_victim_it_names(run: StoredRun, alice: Identity, bob: Identity) -> None:
    envelope = run.envelope(bob, await run.lease_one(alice))
    forged = replace(envelope, key_id=alice.key_id)
    assert isinstance(await refused(run, bob, forged), BadSignature)
    assert not (await run.standing(alice)).banned
    assert (await run.standing(alice)).strikes == 0


@pytest.mark.parametrize("payload", [b"", bytes((1 << 20) + 1)], ids=["a rollout", "too large"])
async def test_a_stolen_token_cannot_strike_its_owner(
    run: StoredRun, alice: Identity, bob: Identity, payload: bytes
) -> None:
    lease = await run.lease_one(alice)
    forged = bob.sign(ROLLOUT, payload) if payload else run.envelope(bob, lease)
    assert isinstance(await refused(run, alice, replace(forged, key_id=alice.key_id)), BadSignature)
    assert (await run.standing(alice)).strikes == 0, "only what a key signed can be held against it"
    await run.submit(alice, lease)


async def test_refusals_without_end_take_one_line(run: StoredRun, alice: Identity) -> None:
    for number in range(5):
        rollout = make_rollout("unknown", f"g0-{number}")
        assert (await refused(run, alice, sign_rollout(rollout, alice))).reason == RejectionReason.LEASE
    assert await run.drops() == {"refused:lease": (5, 0)}
    assert len(await run.rows(t.drops)) == 1


async def test_an_envelope_of_another_type_is_no_submission(run: StoredRun, alice: Identity) -> None:
    lease = await run.lease_one(alice)
    payload = rollout_to_payload(make_rollout(lease.lease_id, lease.sample_id))
    assert isinstance(await refused(run, alice, alice.sign(RECEIPT, payload)), BadSignature)


@pytest.mark.parametrize("extra", [REWARD_99, b"\xff\xff"], ids=["smuggled reward", "garbage"])
async def test_what_is_outside_the_schema_is_fraud(run: StoredRun, alice: Identity, extra: bytes) -> None:
    lease = await run.lease_one(alice)
    payload = rollout_to_payload(make_rollout(lease.lease_id, lease.sample_id)) + extra
    assert (await refused(run, alice, alice.sign(ROLLOUT, payload))).reason == RejectionReason.FORM
    standing = await run.standing(alice)
    assert (standing.banned, standing.strikes) == (True, 1)
    assert await run.drops() == {"refused:form": (1, 0)}


async def test_an_oversized_submission_is_refused_before_it_is_opened(run: StoredRun, alice: Identity) -> None:
    fault = await refused(run, alice, alice.sign(ROLLOUT, bytes((1 << 20) + 1)))
    assert "larger than" in fault.detail


async def test_an_offence_is_counted_once_however_often_it_is_repeated(run: StoredRun, alice: Identity) -> None:
    lease = await run.lease_one(alice)
    rollout = make_rollout(lease.lease_id, lease.sample_id)
    span = replace(rollout.spans[0], manifest_digest="sha256:" + "0" * 64)
    envelope = sign_rollout(replace(rollout, spans=(span,)), alice)
    for _ in range(MAX_STRIKES + 1):
        assert (await refused(run, alice, envelope)).reason == RejectionReason.VERSION
    assert (await run.standing(alice)).strikes == 1
    assert await run.drops() == {"refused:version": (1, 0)}


async def test_a_submission_extends_what_renewals_committed_to(run: StoredRun, alice: Identity) -> None:
    first, second = await run.lease(alice, 2)
    tokens = make_tokens(6)
    commitment = Commitment(3, token_digest(tokens[:3]), 0)
    await run.leasing.renew(alice.key_id, [(first.lease_id, commitment), (second.lease_id, commitment)])
    await run.submit(alice, first, tokens=tokens)
    fault = await refused(run, alice, run.envelope(alice, second, tokens=(9, *tokens[1:])))
    assert fault.reason == RejectionReason.COMMITMENT
    standing = await run.standing(alice)
    assert (standing.strikes, standing.banned) == (1, False), "renewals are not signed: evidence, not proof"


async def test_an_expired_lease_takes_nothing_and_costs_nothing(run: StoredRun, alice: Identity) -> None:
    lease = await run.lease_one(alice)
    await run.let_lease_expire(lease)
    fault = await refused(run, alice, run.envelope(alice, lease))
    assert fault.detail == "the lease is expired"
    assert (await run.standing(alice)).strikes == 0


async def test_what_is_too_old_already_is_refused_at_the_door(begin: Begin, alice: Identity) -> None:
    run = await begin(max_staleness=1)
    lease = await run.lease_one(alice)
    await run.announce(1)
    await run.announce(2)
    assert (await refused(run, alice, run.envelope(alice, lease))).reason == RejectionReason.STALE
    assert (await run.standing(alice)).strikes == 0


async def test_a_withdrawn_version_is_not_accepted_any_more(begin: Begin, alice: Identity) -> None:
    run = await begin(versions=2)
    lease = await run.lease_one(alice)
    await run.change(t.policy_versions, t.policy_versions.c.version == 1, withdrawn=True)
    assert (await refused(run, alice, run.envelope(alice, lease, versions=(1,)))).reason == RejectionReason.STALE
    assert (await run.standing(alice)).strikes == 0, "that it was withdrawn is not the worker's fault"
    await run.submit(alice, lease, versions=(0,))


async def test_equal_tokens_of_different_samples_are_legitimate(run: StoredRun, alice: Identity) -> None:
    assert len(set(await run.work(alice, 4))) == 4


async def test_a_banned_worker_leaves_no_trace_by_what_it_sends(run: StoredRun, alice: Identity) -> None:
    lease = await run.lease_one(alice)
    envelope = run.envelope(alice, lease)
    await run.change(t.workers, t.workers.c.worker_id == alice.key_id, banned=True)
    await run.change(t.leases, state="revoked")
    assert (await refused(run, alice, envelope)).reason == RejectionReason.LEASE
    assert await run.drops() == {}


async def test_an_unregistered_key_is_refused_without_an_account(run: StoredRun, alice: Identity) -> None:
    stranger = make_identity(99)
    lease = await run.lease_one(alice)
    assert (await refused(run, stranger, run.envelope(stranger, lease))).reason == RejectionReason.LEASE


async def test_a_rejected_samples_second_rollout_is_received(run: StoredRun, alice: Identity, bob: Identity) -> None:
    await run.work(alice, 1)
    await run.judge(rejected())
    await run.work(bob, 1)
    states = sorted(row.state for row in await run.rows(t.rollouts, t.rollouts.c.sample_id == "g0-0"))
    assert states == ["pending", "rejected"]


def of_two_turns(lease: Lease, answer: str = "3", turns: str = make_sums().rules.digest) -> Rollout:
    segments = (
        Segment.by_model(tuple(b"1+2=")),
        Segment.by_environment(tuple(answer.encode())),
        Segment.by_model((*b" three", EOS)),
    )
    return make_turns_rollout(lease.lease_id, lease.sample_id, segments, turns=turns)


async def test_a_rollout_of_two_turns_is_received_and_the_models_tokens_are_counted(
    begin: Begin, alice: Identity
) -> None:
    run = await begin(turns=make_sums())
    lease = await run.lease_one(alice)
    await run.intake.submit(alice.key_id, sign_rollout(of_two_turns(lease), alice))
    assert (await run.row(t.rollouts)).tokens == 11
    (pending,) = await run.claim()
    assert pending.rollout == of_two_turns(lease)
    assert await run.record(pending.rollout_id, accepted(pending))
    assert (await run.standing(alice)).credits == 11


async def test_a_tools_answer_that_is_none_is_fraud(begin: Begin, alice: Identity) -> None:
    run = await begin(turns=make_sums())
    lease = await run.lease_one(alice)
    fault = await refused(run, alice, sign_rollout(of_two_turns(lease, "4"), alice))
    assert fault.reason == RejectionReason.FORM and "must stand the tool's answer" in fault.detail
    assert (await run.standing(alice)).banned


async def test_a_run_of_single_turns_takes_no_answers(run: StoredRun, alice: Identity) -> None:
    lease = await run.lease_one(alice)
    fault = await refused(run, alice, sign_rollout(of_two_turns(lease, turns=""), alice))
    assert (fault.reason, fault.detail) == (
        RejectionReason.FORM,
        "the task takes one turn: send one segment, by the model",
    )


async def test_a_renewal_commits_to_answers_too(begin: Begin, alice: Identity) -> None:
    run = await begin(turns=make_sums())
    lease = await run.lease_one(alice)
    tokens = of_two_turns(lease).token_ids
    await run.leasing.renew(alice.key_id, [(lease.lease_id, Commitment(6, token_digest(tokens[:6]), 0))])
    await run.intake.submit(alice.key_id, sign_rollout(of_two_turns(lease), alice))
    assert await run.sample_state(lease.sample_id) == "submitted"


async def test_turns_by_rules_that_the_run_no_longer_has_are_refused_and_cost_nothing(
    begin: Begin, alice: Identity
) -> None:
    """An operator who changes them bans nobody."""
    for now in (make_sums(max_calls=1), None):
        run = await begin(turns=now)
        fault = await refused(run, alice, sign_rollout(of_two_turns(await run.lease_one(alice)), alice))
        assert fault.reason == RejectionReason.LEASE and "start the worker again" in fault.detail
        standing = await run.standing(alice)
        assert (standing.strikes, standing.banned) == (0, False)


async def test_a_single_turn_where_the_run_has_several_now_costs_nothing(begin: Begin, alice: Identity) -> None:
    run = await begin(turns=make_sums())
    fault = await refused(run, alice, run.envelope(alice, await run.lease_one(alice)))
    assert fault.reason == RejectionReason.LEASE and not (await run.standing(alice)).banned
