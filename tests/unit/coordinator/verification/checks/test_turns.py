"""Rollouts of several turns under attack: whatever is claimed of a tool's answers, or of who wrote what, is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.verification.checks import Claim, run_checks
from coordinator.verification.resident import ResidentModels, prefill_rollouts
from protocol import toploc
from protocol.rollout import Author, Outcome, RejectionReason, Rollout, Segment, StopReason, Verdict
from tests.thresholds import BY_HAND
from tests.tiny_model import EOS_TOKEN_ID, HIDDEN_SIZE, build_tiny_model
from tests.turns import CALLS, make_turns
from tests.unit.coordinator.verification.claims import alter, make_claim, make_request, to_prefill
from worker.engine import Generation, Weights
from worker.reference_engine import ReferenceEngine
from worker.turns import generate_turns

TURNS = make_turns()
DIGEST = "sha256:true"
LIMIT = 60
FORM, PROOF, SEED, TERMINATION = (
    RejectionReason.FORM,
    RejectionReason.PROOF,
    RejectionReason.SEED,
    RejectionReason.TERMINATION,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "true")


@pytest.fixture(scope="module")
def models(folder: Path) -> ResidentModels:
    return ResidentModels({DIGEST: folder}.__getitem__, max_resident=1)


@pytest.fixture(scope="module")
def honest(folder: Path) -> list[Claim]:
    requests = [make_request(number, max_tokens=LIMIT) for number in range(6)]

    async def run() -> list[Generation]:
        engine = ReferenceEngine()
        await engine.start(Weights(0, DIGEST, folder))
        found = []
        for request in requests:
            *_, last = [event async for event in generate_turns(engine, request, TURNS)]
            assert isinstance(last, Generation)
            found.append(last)
        await engine.close()
        return found

    claims = [make_claim(*pair, TURNS) for pair in zip(asyncio.run(run()), requests, strict=True)]
    assert all(len(claim.rollout.segments) == 5 for claim in claims)
    return claims


def judged(claim: Claim, models: ResidentModels) -> Verdict:
    """As the verifier does: without a model first."""
    screened = run_checks(claim, None, BY_HAND)
    if screened.outcome is not Outcome.ACCEPTED:
        return screened
    return run_checks(claim, prefill_rollouts([to_prefill(claim)], models)[0], BY_HAND)


def test_the_honest_pass_and_only_the_models_tokens_are_measured(honest: list[Claim], models: ResidentModels) -> None:
    for claim in honest:
        found = prefill_rollouts([to_prefill(claim)], models)[0]
        verdict = run_checks(claim, found, BY_HAND)
        assert verdict.outcome is Outcome.ACCEPTED, verdict.detail
        mask_T = np.array(claim.rollout.loss_mask)
        # What the model would have said in the environment's place is nobody's business.
        spoiled = replace(found, margins_T=np.where(mask_T, found.margins_T, 99.0).astype(np.float32))
        assert run_checks(claim, spoiled, BY_HAND).metrics == verdict.metrics


def segments(claim: Claim) -> list[Segment]:
    return list(claim.rollout.segments)


def remade(claim: Claim, made: list[Segment]) -> Claim:
    """With these segments, and everything else of right form: as many log-probs as tokens, proofs of right number."""
    tokens = sum(len(segment.token_ids) for segment in made)
    mask = [own for segment in made for own in segment.loss_mask]
    kept = [*claim.rollout.logprobs, *[-1.0] * tokens][:tokens]
    (span,) = claim.rollout.spans
    rollout = replace(
        claim.rollout,
        segments=tuple(made),
        logprobs=tuple(logprob or -1.0 if own else 0.0 for logprob, own in zip(kept, mask, strict=True)),
        spans=(replace(span, end=tokens),),
    )
    sampling = replace(claim.sampling, max_tokens=max(LIMIT, tokens))
    return replace(claim, rollout=replace(rollout, proofs=(random_proofs(rollout),)), sampling=sampling)


def random_proofs(rollout: Rollout) -> tuple[bytes, ...]:
    draw = np.random.default_rng(0)
    return tuple(
        proof
        for start, end in rollout.stretches(rollout.spans[0])
        for proof in toploc.build_proofs(draw.integers(0x3E00, 0x4100, (end - start, HIDDEN_SIZE)).astype(np.uint16))
    )


def altered_answer(claim: Claim) -> Claim:
    first, answer, *rest = segments(claim)
    other = Segment.by_environment((answer.token_ids[0] ^ 1, *answer.token_ids[1:]))
    return alter(claim, segments=(first, other, *rest))


def flattering_answer(claim: Claim) -> Claim:
    first, answer, *rest = segments(claim)
    return remade(claim, [first, Segment.by_environment(answer.token_ids + (52, 50)), *rest])


def dropped_answer(claim: Claim) -> Claim:
    first, _, second, *rest = segments(claim)
    return remade(claim, [Segment.by_model(first.token_ids + second.token_ids), *rest])


def dropped_answer_as_two_turns(claim: Claim) -> Claim:
    first, _, *rest = segments(claim)
    return remade(claim, [first, *rest])


def answer_after_no_call(claim: Claim) -> Claim:
    first, *rest = segments(claim)
    kept = first.token_ids[:-1] or (200,)
    return remade(claim, [Segment.by_model(kept), *rest])


def answer_first(claim: Claim) -> Claim:
    return remade(claim, [Segment.by_environment((60, 61)), *segments(claim)])


def answer_last(claim: Claim) -> Claim:
    *_, last = segments(claim)
    return remade(claim, [*segments(claim)[:-1], Segment.by_model(last.token_ids[:-2]), Segment.by_environment((60,))])


def one_call_too_many(claim: Claim) -> Claim:
    """In the last turn a call is text like other text."""
    *before, last = segments(claim)
    third = (*last.token_ids[:4], CALLS[0])
    made = [*before, Segment.by_model(third), Segment.by_environment(TURNS.answer(third)), Segment.by_model((200,))]
    return remade(claim, made)


def models_words_as_the_tools(claim: Claim) -> Claim:
    """Tokens that nobody drew, in the environment's name: they would escape the seed."""
    first, answer, second, *rest = segments(claim)
    half = max(1, len(second.token_ids) // 2)
    made = [
        first,
        Segment.by_environment(answer.token_ids + second.token_ids[:half]),
        Segment.by_model(second.token_ids[half:] or (200,)),
        *rest,
    ]
    return alter(claim, segments=tuple(made)) if second.token_ids[half:] else remade(claim, made)


def the_tools_words_as_the_models(claim: Claim) -> Claim:
    """To be paid for them, or to have them learned."""
    first, answer, second, *rest = segments(claim)
    return remade(claim, [Segment.by_model(first.token_ids + answer.token_ids + second.token_ids), *rest])


def all_by_the_model(claim: Claim) -> Claim:
    return remade(claim, [Segment.by_model(claim.rollout.token_ids)])


def trained_on_the_answer(claim: Claim) -> Claim:
    first, answer, *rest = segments(claim)
    return alter(
        claim, segments=(first, Segment(Author.ENVIRONMENT, answer.token_ids, (True,) * len(answer.token_ids)), *rest)
    )


def beyond_the_bound(claim: Claim) -> Claim:
    """What the tool says is longer than its bound: the cut answer counts, not the whole."""
    first, answer, *rest = segments(claim)
    return remade(claim, [first, Segment.by_environment(answer.token_ids + (62,)), *rest])


def empty_answer(claim: Claim) -> Claim:
    first, _, *rest = segments(claim)
    return remade(claim, [first, Segment.by_environment(()), *rest])


def logprob_of_an_answer(claim: Claim) -> Claim:
    place = len(segments(claim)[0].token_ids)
    logprobs = list(claim.rollout.logprobs)
    logprobs[place] = -3.0
    return alter(claim, logprobs=tuple(logprobs))


def span_that_begins_with_an_answer(claim: Claim) -> Claim:
    place = len(segments(claim)[0].token_ids)
    (span,) = claim.rollout.spans
    spans = (replace(span, end=place), replace(span, version=1, start=place))
    return alter(claim, spans=spans, proofs=(claim.rollout.proofs[0][:1], claim.rollout.proofs[0][1:]))


def proofs_over_the_answers_too(claim: Claim) -> Claim:
    """As many as a single turn would take: fewer than the turns."""
    return alter(claim, proofs=(claim.rollout.proofs[0][:2],))


def behind_the_end(claim: Claim) -> Claim:
    first, *rest = segments(claim)
    return remade(claim, [Segment.by_model((EOS_TOKEN_ID, *first.token_ids)), *rest])


def cut_at_a_call(claim: Claim) -> Claim:
    """Ends with a call whose answer it doesn't like."""
    return remade(claim, segments(claim)[:1])


def cut_at_an_answer(claim: Claim) -> Claim:
    return remade(claim, segments(claim)[:2])


ATTACKS: dict[Callable[[Claim], Claim], str] = {
    altered_answer: "must stand the tool's answer",
    flattering_answer: "turns than its segments say|must stand the tool's answer",
    dropped_answer: "must stand the tool's answer",
    dropped_answer_as_two_turns: "two in a row are by the same author",
    answer_after_no_call: "turns than its segments say|must stand the tool's answer",
    answer_first: "must stand the tool's answer|turns than",
    answer_last: "turns than its segments say",
    one_call_too_many: "turns than its segments say",
    models_words_as_the_tools: "turns than its segments say|must stand the tool's answer",
    the_tools_words_as_the_models: "turns than its segments say",
    all_by_the_model: "turns than its segments say",
    trained_on_the_answer: "false on the environment's",
    beyond_the_bound: "turns than its segments say|must stand",
    empty_answer: "a segment is empty",
    logprob_of_an_answer: "nobody sampled them",
    span_that_begins_with_an_answer: "belong to the span of the token before",
    proofs_over_the_answers_too: "proofs; it takes",
    behind_the_end: "tokens follow an EOS",
    cut_at_a_call: "whose answer is missing",
    cut_at_an_answer: "the model goes on behind them",
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_forged_turn_is_refused_for_its_form(
    attack: Callable[[Claim], Claim], honest: list[Claim], models: ResidentModels
) -> None:
    for claim in honest:
        verdict = judged(attack(claim), models)
        assert (verdict.outcome, verdict.reason) == (Outcome.REJECTED, FORM), verdict.detail
        assert any(words in verdict.detail for words in ATTACKS[attack].split("|")), verdict.detail


def test_an_answer_that_the_model_quotes_must_be_drawn_like_all_of_its_words(
    honest: list[Claim], models: ResidentModels
) -> None:
    """Forged where no call ended, it is read as the model's: of right form then, and given away by proof or seed."""
    for claim in honest:
        first, answer, *_ = segments(claim)
        words = first.token_ids[:-1] + tuple(token for token in answer.token_ids if token not in CALLS)
        forged = remade(claim, [Segment.by_model((*words, *[200] * LIMIT)[:LIMIT])])
        assert judged(alter(forged, stop_reason=StopReason.LENGTH), models).reason in (PROOF, SEED)


def test_the_models_tokens_behind_an_answer_are_held_to_the_seed(honest: list[Claim], models: ResidentModels) -> None:
    """Right proofs and log-probs of other tokens: the replay goes by the absolute position, answers counted."""
    claim = honest[0]
    *before, last = segments(claim)
    found = prefill_rollouts([to_prefill(claim)], models)[0]
    shifted = replace(claim, seed=claim.seed + 1)
    assert run_checks(shifted, prefill_rollouts([to_prefill(shifted)], models)[0], BY_HAND).reason is SEED
    at = len(claim.rollout.token_ids) - 1
    token = next(t for t in (201, 202, 203) if t != last.token_ids[-1])
    edited = alter(claim, segments=(*before, Segment.by_model((*last.token_ids[:-1], token))))
    again = prefill_rollouts([to_prefill(edited)], models)[0]
    flawless = alter(edited, logprobs=(*claim.rollout.logprobs[:-1], float(again.logprobs_T[at])))
    verdict = run_checks(flawless, again, BY_HAND)
    assert verdict.reason is SEED and found.margins_T[at] < again.margins_T[at]


def test_a_rollout_ends_early_only_where_a_call_has_no_room(honest: list[Claim]) -> None:
    claim = honest[0]
    *before, last = segments(claim)
    shorter = remade(claim, [*before, Segment.by_model(last.token_ids[:-1])])
    assert run_checks(shorter, None, BY_HAND).reason is TERMINATION
    # In the last turn nothing is a call, so nothing ends there either.
    calls = remade(claim, [*before, Segment.by_model((*last.token_ids[:-3], CALLS[0]))])
    assert run_checks(calls, None, BY_HAND).reason is TERMINATION
    tight = replace(claim.sampling, max_tokens=len(before[0].token_ids) + 6)
    cut = replace(remade(claim, before[:1]), sampling=tight)
    assert run_checks(cut, None, BY_HAND).outcome is Outcome.ACCEPTED
    as_eos = run_checks(alter(cut, stop_reason=StopReason.EOS), None, BY_HAND)
    assert as_eos.reason is TERMINATION and "claims to end by EOS" in as_eos.detail


def test_a_task_of_one_turn_admits_no_answers(honest: list[Claim]) -> None:
    for claim in honest:
        verdict = run_checks(replace(claim, turns=None), None, BY_HAND)
        assert (verdict.reason, verdict.detail) == (FORM, "the task takes one turn: send one segment, by the model")
