"""Cheats at the door, on a real database: who signed what, whose lease it is, and what was committed to.

Refused at the door costs what docs/protocol.md says; what the door can't see is the verifier's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from coordinator.store import tables as t
from protocol import toploc
from protocol.errors import WorkerFault
from protocol.lease import Commitment, Lease
from protocol.rollout import RejectionReason, Rollout, VersionSpan, token_digest
from protocol.signing import ROLLOUT, Identity, SignedEnvelope
from protocol.wire import rollout_to_payload
from tests.adversary.attacks import claims
from tests.factories import (
    HIDDEN_SIZE,
    make_identity,
    make_proofs,
    make_rollout,
    make_tokens,
    sign_rollout,
    version_digest,
)
from tests.stored_run import StoredRun

ALICE, MALLORY = make_identity(11), make_identity(13)


@pytest_asyncio.fixture
async def run(sqlite_url: str) -> AsyncIterator[StoredRun]:
    run = await StoredRun.begin(sqlite_url, versions=3)
    await run.join(ALICE, MALLORY)
    yield run
    await run.db.close()


async def refused(run: StoredRun, envelope: SignedEnvelope, caller: Identity = MALLORY) -> str:
    """The reason for which it is not let in; nothing is stored."""
    before = len(await run.rows(t.rollouts))
    with pytest.raises(WorkerFault) as caught:
        await run.intake.submit(caller.key_id, envelope)
    assert len(await run.rows(t.rollouts)) == before
    return str(caught.value.reason)


async def cost(run: StoredRun, worker: Identity = MALLORY) -> tuple[bool, int]:
    """(banned, strikes)"""
    standing = await run.standing(worker)
    return standing.banned, standing.strikes


def answer(lease: Lease, version: int = 2, **changes: object) -> Rollout:
    """A rollout of good form for the lease."""
    return replace(make_rollout(lease.lease_id, lease.sample_id, versions=(version,)), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("part", ["payload", "signature", "key_id"])
async def test_forged_signatures(run: StoredRun, part: str) -> None:
    lease = await run.lease_one(ALICE)
    signed = sign_rollout(answer(lease), MALLORY)
    forged = {
        "payload": replace(signed, payload=rollout_to_payload(answer(lease, 1))),
        "signature": replace(signed, signature=signed.signature[:-1] + bytes([signed.signature[-1] ^ 1])),
        "key_id": replace(signed, key_id=ALICE.key_id),
    }[part]
    assert await refused(run, forged, ALICE if part == "key_id" else MALLORY) == RejectionReason.SIGNATURE
    assert await cost(run) == await cost(run, ALICE) == (False, 0), "what nobody signed is held against nobody"


async def test_the_lease_of_another(run: StoredRun) -> None:
    lease = await run.lease_one(ALICE)
    assert await refused(run, sign_rollout(answer(lease), MALLORY)) == RejectionReason.LEASE
    await run.intake.submit(ALICE.key_id, sign_rollout(answer(lease), ALICE))
    assert await cost(run) == (False, 0)


async def test_a_copy_of_anothers_envelope(run: StoredRun) -> None:
    envelope = sign_rollout(answer(await run.lease_one(ALICE)), ALICE)
    await run.intake.submit(ALICE.key_id, envelope)
    assert await refused(run, envelope) == RejectionReason.SIGNATURE


async def test_a_copy_of_anothers_rollout_signed_anew_needs_its_lease(run: StoredRun) -> None:
    lease = await run.lease_one(ALICE)
    await run.intake.submit(ALICE.key_id, sign_rollout(answer(lease), ALICE))
    assert await refused(run, sign_rollout(answer(lease), MALLORY)) == RejectionReason.LEASE


async def test_replays_are_paid_once(run: StoredRun) -> None:
    lease = await run.lease_one(MALLORY)
    envelope = sign_rollout(answer(lease), MALLORY)
    receipts = [await run.intake.submit(MALLORY.key_id, envelope) for _ in range(3)]
    assert len(set(receipts)) == 1
    await run.judge()
    assert await run.intake.submit(MALLORY.key_id, envelope) == receipts[0]
    assert (await run.standing(MALLORY)).credits == 6
    other = sign_rollout(answer(lease, 1), MALLORY)
    assert await refused(run, other) == RejectionReason.LEASE, "a second answer to the same lease"
    assert (await run.standing(MALLORY)).credits == 6


async def test_an_abandoned_sample_comes_back_with_its_seed(run: StoredRun) -> None:
    """Giving up, or letting it expire, in the hope of a better draw."""

    async def seeds(count: int) -> dict[str, int]:
        granted = await run.leasing.acquire(MALLORY.key_id, count)
        leases = [lease for lease, _ in granted.leases]
        await run.leasing.give_back(MALLORY.key_id, [lease.lease_id for lease in leases[::2]])
        for lease in leases[1::2]:
            await run.let_lease_expire(lease)
        return {sample.sample_id: sample.seed for _, sample in granted.leases}

    first, again = await seeds(4), await seeds(8)
    assert first.keys() & again.keys() and all(again[s] == first[s] for s in first.keys() & again.keys())


async def test_progress_that_was_committed_to_binds_however_it_turns_out(run: StoredRun) -> None:
    lease = await run.lease_one(MALLORY)
    begun = make_tokens(6)
    for length in (2, 4):
        progress = Commitment(length, token_digest(begun[:length]), 2)
        assert (await run.leasing.renew(MALLORY.key_id, [(lease.lease_id, progress)]))[0][0].problem == ""
    better = sign_rollout(make_rollout(lease.lease_id, lease.sample_id, tokens=(9, *begun[1:])), MALLORY)
    assert await refused(run, better) == RejectionReason.COMMITMENT
    assert await cost(run) == (False, 1)


async def test_progress_can_not_be_taken_back_by_a_later_renewal(run: StoredRun) -> None:
    lease = await run.lease_one(MALLORY)
    begun, other = make_tokens(6), make_tokens(6, first=100)
    for tokens, length, problem in ((begun, 4, ""), (other, 4, "other tokens"), (begun, 4, "the lease is returned")):
        progress = Commitment(length, token_digest(tokens[:length]), 2)
        ((renewal,), _) = await run.leasing.renew(MALLORY.key_id, [(lease.lease_id, progress)])
        assert renewal.problem.startswith(problem) and bool(renewal.problem) is bool(problem)


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ((2,), None),
        ((1, 2), None),  # a border is within the rules: the proofs must bear it out
        ((0,), RejectionReason.STALE),
        ((0, 2), RejectionReason.STALE),
        ((3,), RejectionReason.VERSION),
    ],
)
async def test_versions_claimed(run: StoredRun, versions: tuple[int, ...], reason: RejectionReason | None) -> None:
    lease = await run.lease_one(MALLORY)
    claimed = sign_rollout(make_rollout(lease.lease_id, lease.sample_id, versions=versions), MALLORY)
    if reason is None:
        await run.intake.submit(MALLORY.key_id, claimed)
    else:
        assert await refused(run, claimed) == reason


async def test_a_version_under_another_versions_digest(run: StoredRun) -> None:
    lease = await run.lease_one(MALLORY)
    spans = (VersionSpan(2, version_digest(1), 0, 6),)
    assert await refused(run, sign_rollout(answer(lease, spans=spans), MALLORY)) == RejectionReason.VERSION
    assert await cost(run) == (False, 1)


@pytest.mark.parametrize(
    "borders",
    [((0, 3), (4, 6)), ((0, 4), (3, 6)), ((0, 6), (6, 6)), ((0, 3), (3, 7)), ((1, 3), (3, 6)), ()],
    ids=["gap", "overlap", "empty", "beyond", "late", "none"],
)
async def test_lying_spans(run: StoredRun, borders: tuple[tuple[int, int], ...]) -> None:
    lease = await run.lease_one(MALLORY)
    spans = tuple(VersionSpan(n + 1, version_digest(n + 1), *border) for n, border in enumerate(borders))
    lying = answer(lease, spans=spans, proofs=tuple(make_proofs((span,))[0] if len(span) else () for span in spans))
    assert await refused(run, sign_rollout(lying, MALLORY)) == RejectionReason.FORM
    assert (await cost(run))[0], "no honest worker sends that"


@pytest.mark.parametrize("versions", [(2, 1), (1, 1)], ids=["descending", "twice"])
async def test_spans_whose_versions_do_not_ascend(run: StoredRun, versions: tuple[int, int]) -> None:
    lease = await run.lease_one(MALLORY)
    lying = make_rollout(lease.lease_id, lease.sample_id, versions=versions)
    assert await refused(run, sign_rollout(lying, MALLORY)) == RejectionReason.FORM


@pytest.mark.parametrize(
    "make",
    [
        claims.zero_modulus,
        claims.too_few,
        claims.too_many,
        claims.none_at_all,
        claims.empty,
        claims.two_bytes,
        claims.huge,
        claims.constant,
        claims.polynomial(degree=5),
    ],
    ids=lambda make: getattr(make, "__name__", "proofs"),
)
async def test_hostile_proofs(run: StoredRun, make: claims.MakeProofs) -> None:
    lease = await run.lease_one(MALLORY)
    honest = answer(lease)
    proofs = tuple(make(span, proofs) for span, proofs in zip(honest.spans, honest.proofs, strict=True))
    assert await refused(run, sign_rollout(replace(honest, proofs=proofs), MALLORY)) == RejectionReason.FORM
    assert (await cost(run))[0]
    assert toploc.chunk_k(6, HIDDEN_SIZE) == 6 * HIDDEN_SIZE, "shorter than 128: the length of a proof follows"


@pytest.mark.parametrize("logprob", [float("nan"), float("inf"), float("-inf"), 0.5])
async def test_log_probs_that_no_distribution_has(run: StoredRun, logprob: float) -> None:
    lease = await run.lease_one(MALLORY)
    lying = answer(lease, logprobs=(logprob, *(-0.5,) * 5))
    assert await refused(run, sign_rollout(lying, MALLORY)) == RejectionReason.FORM


async def test_an_envelope_of_another_kind_and_a_payload_of_nothing(run: StoredRun) -> None:
    lease = await run.lease_one(MALLORY)
    payload = rollout_to_payload(answer(lease))
    assert await refused(run, MALLORY.sign("receipt", payload)) == RejectionReason.SIGNATURE
    assert await cost(run) == (False, 0), "that signature says nothing of rollouts"
    assert await refused(run, MALLORY.sign(ROLLOUT, b"")) == RejectionReason.FORM
