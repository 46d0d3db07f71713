from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.admission import Accepted, Limits, Refused, admit
from protocol.lease import Commitment, Lease, LeaseState
from protocol.ledger import BLAMELESS
from protocol.rollout import (
    Author,
    RejectionReason,
    Rollout,
    SamplingParams,
    Segment,
    StopReason,
    VersionSpan,
    token_digest,
)
from tests.factories import (
    EOS,
    HIDDEN_SIZE,
    MAX_TOKENS,
    RUN_ID,
    VOCAB_SIZE,
    make_rollout,
    make_tokens,
    version_digest,
)

LEASE = Lease("lease", "g0-0", "worker", min_version=0, deadline=100.0)
VERSIONS = {version: version_digest(version) for version in range(6)}


def decide(rollout: Rollout, lease: Lease | None = LEASE, **changes: Any) -> Accepted | Refused:
    options: dict[str, Any] = {
        "worker_id": "worker",
        "sampling": SamplingParams(1.0, MAX_TOKENS, (EOS,)),
        "versions": VERSIONS,
        "head": 0,
        "now": 50.0,
        "limits": Limits(RUN_ID, VOCAB_SIZE, HIDDEN_SIZE, max_staleness=2),
    }
    return admit(rollout, lease=lease, **{**options, **changes})


def refusal(decision: Accepted | Refused) -> tuple[RejectionReason, str]:
    assert isinstance(decision, Refused)
    return decision.reason, decision.detail


@pytest.mark.parametrize("versions", [(0,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("length", [6, 33, 40])
def test_an_honest_rollout_is_received(versions: tuple[int, ...], length: int) -> None:
    assert decide(make_rollout(tokens=make_tokens(length), versions=versions), head=2) == Accepted()


def test_the_longest_answer_needs_no_eos() -> None:
    assert decide(make_rollout(tokens=range(MAX_TOKENS))) == Accepted()


@pytest.mark.parametrize(
    ("rollout", "lease", "now", "detail"),
    [
        (make_rollout(run_id="other"), LEASE, 50.0, "made for run 'other', this is test-run"),
        (make_rollout(), None, 50.0, "no such lease"),
        (make_rollout(), replace(LEASE, worker_id="mallory"), 50.0, "another worker's"),
        (make_rollout(sample_id="g0-1"), LEASE, 50.0, "another sample"),
        (make_rollout(), LEASE, 100.0, "the lease is expired"),
        (make_rollout(), replace(LEASE, state=LeaseState.COMPLETED), 50.0, "the lease is completed"),
        (make_rollout(), replace(LEASE, state=LeaseState.RETURNED), 50.0, "the lease is returned"),
        (make_rollout(), replace(LEASE, state=LeaseState.REVOKED), 50.0, "the lease is revoked"),
    ],
)
def test_a_rollout_answers_one_live_lease_of_its_worker(
    rollout: Rollout, lease: Lease | None, now: float, detail: str
) -> None:
    reason, text = refusal(decide(rollout, lease, now=now))
    assert reason is RejectionReason.LEASE
    assert detail in text


@pytest.mark.parametrize(
    "rollout",
    [
        make_rollout(tokens=make_tokens(MAX_TOKENS + 1)),
        make_rollout(tokens=(1, VOCAB_SIZE, EOS)),
        replace(make_rollout(), logprobs=(-0.5,) * 5),
        replace(make_rollout(), logprobs=(float("nan"),) * 6),
        replace(make_rollout(), logprobs=(0.5,) * 6),
        replace(make_rollout(), spans=()),
        replace(make_rollout(), segments=()),
        replace(make_rollout(), proofs=()),
        replace(make_rollout(), proofs=((),)),
        replace(make_rollout(), proofs=((bytes(10),),)),
        replace(make_rollout(versions=(0, 1)), spans=tuple(reversed(make_rollout(versions=(0, 1)).spans))),
    ],
)
def test_what_breaks_the_form_is_refused_as_such(rollout: Rollout) -> None:
    assert refusal(decide(rollout, head=1))[0] is RejectionReason.FORM


def test_the_proofs_length_goes_by_the_models_hidden_size() -> None:
    limits = Limits(RUN_ID, VOCAB_SIZE, HIDDEN_SIZE * 2, max_staleness=2)
    short = make_rollout(tokens=(1, 2, 3, EOS))  # 4 tokens of 16 numbers: fewer than 128
    assert refusal(decide(short, limits=limits))[0] is RejectionReason.FORM


@pytest.mark.parametrize("committed", [1, 5, 6])
def test_a_submission_extends_what_was_committed(committed: int) -> None:
    tokens = make_tokens(6)
    lease = replace(LEASE, commitment=Commitment(committed, token_digest(tokens[:committed]), 0))
    assert decide(make_rollout(tokens=tokens), lease) == Accepted()
    other = (200, *tokens[1:])
    reason, detail = refusal(decide(make_rollout(tokens=other), lease))
    assert reason is RejectionReason.COMMITMENT
    assert detail.startswith(
        f"does not begin with the {committed} tokens committed before: lease {LEASE.lease_id}, sha256"
    )


def test_a_submission_is_not_shorter_than_what_was_committed() -> None:
    lease = replace(LEASE, commitment=Commitment(7, token_digest(make_tokens(7)), 0))
    assert refusal(decide(make_rollout(tokens=make_tokens(6)), lease))[0] is RejectionReason.COMMITMENT


def test_only_published_versions_under_their_own_digest_count() -> None:
    without_0 = {version: digest for version, digest in VERSIONS.items() if version != 0}
    for versions in ({}, without_0, {0: version_digest(1)}):
        reason, detail = refusal(decide(make_rollout(), versions=versions))
        assert reason is RejectionReason.VERSION
        assert "is not published" in detail


@pytest.mark.parametrize(("head", "accepted"), [(3, True), (4, True), (5, False)])
def test_the_oldest_span_decides_on_staleness(head: int, accepted: bool) -> None:
    rollout = make_rollout(tokens=make_tokens(9), versions=(2, 3))
    decision = decide(rollout, head=head)
    assert (decision == Accepted()) is accepted
    if not accepted:
        assert refusal(decision) == (
            RejectionReason.STALE,
            "begun under version 2; the oldest admissible is 3",
        )


def test_no_token_is_older_than_the_lease_allows() -> None:
    assert refusal(decide(make_rollout(), replace(LEASE, min_version=1)))[0] is RejectionReason.STALE


def test_what_a_worker_wrote_is_quoted_in_refusals() -> None:
    span = replace(make_rollout().spans[0], manifest_digest="\0\n<script>" + "x" * 500)
    _, detail = refusal(decide(replace(make_rollout(), spans=(span,))))
    assert detail.isprintable() and len(detail) < 120
    _, detail = refusal(decide(make_rollout(run_id="\0" * 500)))
    assert detail.isprintable() and len(detail) < 120


def hostile_rollouts() -> st.SearchStrategy[Rollout]:
    """The honest rollout with fields of any value that the wire can carry."""
    tokens = st.lists(st.one_of(st.integers(0, VOCAB_SIZE), st.integers(0, 2**32 - 1)), max_size=45).map(tuple)
    masks = st.lists(st.booleans(), max_size=6).map(tuple)
    segment = st.one_of(tokens.map(Segment.by_model), st.builds(Segment, st.sampled_from(Author), tokens, masks))
    edge = st.one_of(st.integers(0, 45), st.integers(0, 2**32 - 1))
    version = st.one_of(st.integers(0, 6), st.integers(0, 2**64 - 1))
    digest = st.one_of(st.sampled_from(sorted(VERSIONS.values())), st.text(max_size=80))
    honest = make_rollout(tokens=make_tokens(9), versions=(0, 1))
    proof = st.one_of(st.sampled_from(honest.proofs[0]), st.binary(max_size=300))
    fields: dict[str, st.SearchStrategy[Any]] = {
        "segments": st.lists(segment, max_size=3).map(tuple),
        "logprobs": st.lists(st.floats(width=32), max_size=45).map(tuple),
        "spans": st.lists(st.builds(VersionSpan, version, digest, edge, edge), max_size=3).map(tuple),
        "proofs": st.lists(st.lists(proof, max_size=3).map(tuple), max_size=3).map(tuple),
        "stop_reason": st.sampled_from(StopReason),
        "sample_id": st.text(max_size=9),
    }
    return st.fixed_dictionaries({}, optional=fields).map(lambda changes: replace(honest, **changes))


@given(hostile_rollouts(), st.integers(0, 6))
@settings(max_examples=200, deadline=None)
def test_whatever_a_rollout_holds_the_door_decides_and_later_checks_can_rely_on_it(rollout: Rollout, head: int) -> None:
    decision = decide(rollout, head=head)
    if isinstance(decision, Refused):
        assert decision.detail and len(decision.detail) < 400
        return
    assert len(rollout.token_ids) == len(rollout.logprobs) == rollout.spans[-1].end > 0
    assert all(VERSIONS[span.version] == span.manifest_digest for span in rollout.spans)
    assert rollout.oldest_version >= head - 2 and max(rollout.token_ids) < VOCAB_SIZE
    assert all(rollout.loss_mask) and [len(p) for p in rollout.proofs] == [span.proof_count for span in rollout.spans]


def test_a_precision_that_the_run_does_not_admit_is_refused_without_blame() -> None:
    made = replace(make_rollout(LEASE.lease_id, LEASE.sample_id), precision="fp8")
    reason, detail = refusal(decide(made))
    assert reason is RejectionReason.PRECISION and reason in BLAMELESS and "admits bf16" in detail
    assert decide(made, limits=Limits(RUN_ID, VOCAB_SIZE, HIDDEN_SIZE, 2, ("bf16", "fp8"))) == Accepted()
