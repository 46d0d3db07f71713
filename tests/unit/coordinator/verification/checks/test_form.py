"""Form and termination: what is refused before any model runs, and in which words."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from coordinator.verification.checks import Claim, TerminationCheck, run_checks
from protocol import toploc
from protocol.rollout import (
    Author,
    Outcome,
    RejectionReason,
    Rollout,
    SamplingParams,
    Segment,
    StopReason,
    VersionSpan,
)
from tests.thresholds import BY_HAND
from tests.unit.coordinator.verification.claims import alter, with_tokens

VOCABULARY, HIDDEN, EOS, LIMIT = 50, 16, 49, 70


def make_form_claim(tokens: int = LIMIT, *, eos: bool = False, borders: tuple[int, ...] = ()) -> Claim:
    """A claim of right form; its proofs commit to random activations."""
    ids = [1 + index % 40 for index in range(tokens - eos)] + [EOS] * eos
    edges = [0, *borders, tokens]
    spans = tuple(VersionSpan(v, f"sha256:{v}", a, b) for v, (a, b) in enumerate(pairwise(edges)))
    hidden_TD = np.random.default_rng(0).integers(0x3E00, 0x4100, (tokens, HIDDEN)).astype(np.uint16)
    rollout = Rollout(
        run_id="run",
        lease_id="lease",
        sample_id="sample",
        segments=(Segment.by_model(tuple(ids)),),
        logprobs=(-1.0,) * tokens,
        spans=spans,
        proofs=tuple(toploc.build_proofs(hidden_TD[span.start : span.end]) for span in spans),
        stop_reason=StopReason.EOS if eos else StopReason.LENGTH,
    )
    return Claim(rollout, (1, 2), SamplingParams(1.0, LIMIT, (EOS,)), 5, VOCABULARY, HIDDEN)


@pytest.mark.parametrize(
    "claim",
    [
        make_form_claim(),
        make_form_claim(1, eos=True),
        make_form_claim(7, eos=True),
        make_form_claim(LIMIT, eos=True),
        make_form_claim(borders=(1, 33)),
    ],
    ids=["full", "one", "short", "eos-at-the-limit", "three-spans"],
)
def test_honest_forms_pass(claim: Claim) -> None:
    verdict = run_checks(claim, None, BY_HAND)
    assert (verdict.outcome, verdict.audited, verdict.detail) == (Outcome.ACCEPTED, False, "")


BASE = make_form_claim()
SPAN = BASE.rollout.spans[0]
PROOFS = BASE.rollout.proofs[0]
TOKENS = BASE.rollout.token_ids


def with_proof(proof: bytes) -> Claim:
    return alter(BASE, proofs=((proof, *PROOFS[1:]),))


def constant(value: int) -> bytes:
    return b"\xff\xd9" + value.to_bytes(2, "big") + bytes(2 * 127)


MALFORMED = {
    "no tokens": (alter(BASE, segments=(), logprobs=(), spans=(), proofs=()), "no token written by the model"),
    "too long": (replace(BASE, sampling=SamplingParams(1.0, LIMIT - 1, (EOS,))), "the lease allows 69"),
    "token too large": (with_tokens(BASE, (*TOKENS[:-1], VOCABULARY)), "token 69 is 50, outside the vocabulary of 50"),
    "token negative": (with_tokens(BASE, (-1, *TOKENS[1:])), "token 0 is -1"),
    "logprobs too few": (alter(BASE, logprobs=(-1.0,) * 69), "69 log-probs came for 70 tokens"),
    "logprob nan": (alter(BASE, logprobs=(float("nan"),) + (-1.0,) * 69), "log-prob of token 0 is nan"),
    "logprob infinite": (alter(BASE, logprobs=(-1.0,) * 69 + (float("-inf"),)), "log-prob of token 69 is -inf"),
    "logprob positive": (alter(BASE, logprobs=(0.5,) + (-1.0,) * 69), "log-prob of token 0 is 0.5"),
    "mask too short": (alter(BASE, segments=(Segment(Author.MODEL, TOKENS, (True,)),)), "a loss mask of 1"),
    "mask false": (
        alter(BASE, segments=(Segment(Author.MODEL, TOKENS, (False,) * 70),)),
        "must be true on the model's",
    ),
    "environment invented": (
        alter(BASE, segments=(Segment(Author.ENVIRONMENT, (3,), (False,)), Segment.by_model(TOKENS[1:]))),
        "the task takes one turn",
    ),
    "span gap": (alter(BASE, spans=(replace(SPAN, start=1),)), "must begin at 0"),
    "span short": (alter(BASE, spans=(replace(SPAN, end=69),)), "cover [0, 69) of 70"),
    "span empty": (alter(BASE, spans=(replace(SPAN, end=0), SPAN)), "hold at least one token"),
    "span same version": (
        alter(BASE, spans=(replace(SPAN, end=32), replace(SPAN, start=32)), proofs=(PROOFS[:1], PROOFS[1:])),
        "must ascend",
    ),
    "no spans": (alter(BASE, spans=(), proofs=()), "cover [0, 0) of 70"),
    "proof lists missing": (alter(BASE, proofs=()), "0 lists of proofs came for 1 spans"),
    "proofs too few": (alter(BASE, proofs=(PROOFS[:2],)), "came with 2 proofs; it takes 3"),
    "proofs too many": (alter(BASE, proofs=((*PROOFS, PROOFS[0]),)), "came with 4 proofs; it takes 3"),
    "proof empty": (with_proof(b""), "proof has 0 bytes"),
    "proof two bytes": (with_proof(b"\xff\xd9"), "proof has 2 bytes"),
    "proof huge": (with_proof(bytes(4 << 20)), "proof has 4194304 bytes"),
    "proof of modulus 0": (with_proof(bytes(2) + PROOFS[0][2:]), "modulus 0 is outside"),
    "proof all zero": (with_proof(constant(0)), "degenerate"),
    "proof constant": (with_proof(constant(0x3F80)), "degenerate"),
    "proof coefficient": (with_proof(PROOFS[0][:2] + b"\xff\xff" + PROOFS[0][4:]), "coefficient 65535"),
}


@pytest.mark.parametrize(("claim", "message"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_rollouts_are_rejected_in_words(claim: Claim, message: str) -> None:
    verdict = run_checks(claim, None, BY_HAND)
    assert (verdict.outcome, verdict.reason) == (Outcome.REJECTED, RejectionReason.FORM)
    assert message in verdict.detail


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        (with_tokens(make_form_claim(), (EOS, *TOKENS[1:])), "tokens follow an EOS"),
        (alter(make_form_claim(9, eos=True), stop_reason=StopReason.LENGTH), "its last token is an EOS"),
        (alter(make_form_claim(9), stop_reason=StopReason.EOS), "claims to end by EOS"),
        (make_form_claim(69), "ends without EOS after 69 of 70 tokens"),
    ],
    ids=["eos-inside", "eos-as-length", "no-eos", "cut"],
)
def test_ends_only_by_eos_or_at_the_limit(claim: Claim, message: str) -> None:
    result = TerminationCheck()(claim)
    assert not result.passed and message in result.detail
    verdict = run_checks(claim, None, BY_HAND)
    assert (verdict.outcome, verdict.reason) == (Outcome.REJECTED, RejectionReason.TERMINATION)


def in_pieces(claim: Claim, *borders: int) -> Claim:
    tokens = claim.rollout.token_ids
    edges = [0, *borders, len(tokens)]
    return alter(claim, segments=tuple(Segment.by_model(tokens[a:b]) for a, b in pairwise(edges)))


@pytest.mark.parametrize("borders", [(4,), (0,), (7, 7)], ids=["two turns in one", "empty first", "empty last"])
def test_one_turn_is_one_segment(borders: tuple[int, ...]) -> None:
    claim = with_tokens(make_form_claim(7, eos=True), (1, 2, 3, EOS, 4, 5, EOS))  # goes on after the first EOS
    assert not TerminationCheck()(claim).passed
    verdict = run_checks(in_pieces(claim, *borders), None, BY_HAND)
    assert (verdict.outcome, verdict.reason) == (Outcome.REJECTED, RejectionReason.FORM)
