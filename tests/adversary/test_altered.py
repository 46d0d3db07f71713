"""What is honestly generated and then altered: each alteration is refused, and for the reason that fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.verification.resident import ResidentModels
from protocol.rollout import Outcome, RejectionReason
from tests.adversary.attacks import Attack, Cheat, make_cheat
from tests.adversary.attacks.prefilled import Prefilled
from tests.adversary.batch import write_all
from tests.adversary.judging import judge, make_requests, reasons
from tests.unit.coordinator.verification.claims import make_request
from worker.engine import Generation, Weights

FORM, TERMINATION, PROOF, LOGPROB, SEED = (
    RejectionReason.FORM,
    RejectionReason.TERMINATION,
    RejectionReason.PROOF,
    RejectionReason.LOGPROB,
    RejectionReason.SEED,
)
REQUESTS = make_requests(16)
# The first token that is wrong makes its own log-prob wrong, and the activations after it.
ALTERED = {
    Attack.RANDOM_TOKENS: {PROOF},
    Attack.EDITED_EARLY: {PROOF, LOGPROB},
    Attack.EDITED_TOKEN: {PROOF, LOGPROB},
    Attack.EDITED_LAST: {PROOF, LOGPROB, SEED},
    Attack.TRUNCATED: {PROOF, TERMINATION},
    Attack.REPLAY: {PROOF},
    Attack.LYING_LOGPROB: {LOGPROB},
    Attack.LYING_LOGPROBS: {LOGPROB},
    Attack.LYING_SPANS: {PROOF},
    Attack.PROOF_NAN: {PROOF},
    Attack.PROOF_HALF_DEGREE: {PROOF},
    Attack.PROOF_ONES: {PROOF},
    **{
        attack: {FORM}
        for attack in (
            Attack.PROOF_ZERO_MODULUS,
            Attack.PROOF_TOO_FEW,
            Attack.PROOF_TOO_MANY,
            Attack.PROOF_NONE,
            Attack.PROOF_EMPTY,
            Attack.PROOF_TWO_BYTES,
            Attack.PROOF_HUGE,
            Attack.PROOF_CONSTANT,
            Attack.PROOF_LOW_DEGREE,
        )
    },
}
# With flawless proofs and log-probs only the draw is left.
PREFILLED = (
    Attack.RANDOM_TOKENS,
    Attack.EDITED_EARLY,
    Attack.EDITED_TOKEN,
    Attack.EDITED_LAST,
    Attack.REPLAY,
)


@pytest.fixture(scope="module")
def honest(published: Weights, tmp_path_factory: pytest.TempPathFactory) -> list[Generation]:
    return write_all(Cheat(), REQUESTS, published, tmp_path_factory.mktemp("scratch"))


def altered(cheat: Cheat, honest: list[Generation], older: Weights, published: Weights, scratch: Path) -> list[int]:
    """The samples that the cheat makes something else of, and the cheat's claims in their place."""
    cheat.weights(older, scratch)
    cheat.weights(published, scratch)
    changed = []
    for number, request in enumerate(REQUESTS):
        claimed = cheat.falsify(honest[number], request)
        if claimed != honest[number] and (claimed.token_ids != honest[number].token_ids or not _only_tokens(cheat)):
            changed.append(number)
            honest[number] = claimed
    return changed


def _only_tokens(cheat: Cheat) -> bool:
    """Prefilled proofs of unchanged tokens are the honest rollout again."""
    return type(cheat) is Prefilled


def test_what_is_not_altered_is_accepted(honest: list[Generation], models: ResidentModels) -> None:
    assert {verdict.outcome for verdict in judge(honest, REQUESTS, models)} == {Outcome.ACCEPTED}


@pytest.mark.parametrize("attack", ALTERED)
def test_an_alteration_is_refused(
    attack: Attack, honest: list[Generation], older: Weights, published: Weights, models: ResidentModels, tmp_path: Path
) -> None:
    claims = list(honest)
    changed = altered(make_cheat(attack), claims, older, published, tmp_path)
    assert len(changed) >= len(REQUESTS) - 2
    verdicts = judge([claims[n] for n in changed], [REQUESTS[n] for n in changed], models)
    assert reasons(verdicts) <= ALTERED[attack], [verdict.detail for verdict in verdicts]
    assert all(verdict.detail for verdict in verdicts)


@pytest.mark.parametrize("attack", PREFILLED)
def test_an_alteration_with_flawless_proofs_is_given_away_by_the_draw(
    attack: Attack, honest: list[Generation], older: Weights, published: Weights, models: ResidentModels, tmp_path: Path
) -> None:
    claims = list(honest)
    changed = altered(Prefilled(make_cheat(attack)), claims, older, published, tmp_path)
    assert len(changed) >= len(REQUESTS) - 2
    verdicts = judge([claims[n] for n in changed], [REQUESTS[n] for n in changed], models)
    assert reasons(verdicts) == {SEED}


def test_a_copy_of_another_samples_completion_within_the_group_is_given_away_by_the_draw(
    published: Weights, models: ResidentModels, tmp_path: Path
) -> None:
    """Prompt, weights and tokens are right: the copy's proofs and log-probs are flawless as they are."""
    group = [make_request(500 + n, max_tokens=40, group_size=4) for n in range(4)]
    mine, *others = write_all(Cheat(), group, published, tmp_path)
    assert len(mine.token_ids) > 4 and mine.token_ids not in [other.token_ids for other in others]
    assert reasons(judge([mine], group[:1], models)) == {None}
    assert reasons(judge([mine] * 3, group[1:], models)) == {SEED}


def test_another_version_claimed_for_honest_tokens_is_refused(
    honest: list[Generation], older: Weights, models: ResidentModels
) -> None:
    lying = [
        replace(g, spans=tuple(replace(s, version=0, manifest_digest=older.manifest_digest) for s in g.spans))
        for g in honest
    ]
    assert reasons(judge(lying, REQUESTS, models)) == {PROOF}


@pytest.mark.parametrize("attack", [Attack.TRUNCATED, Attack.FLATTERING_CUT])
def test_a_cut_with_flawless_proofs_is_refused_or_a_near_tie(
    attack: Attack,
    honest: list[Generation],
    older: Weights,
    published: Weights,
    models: ResidentModels,
    tmp_path: Path,
) -> None:
    """Where an EOS all but won the draw, a cut there can't be told from rounding: rare, and counted by pooled tests."""
    claims = list(honest)
    cheat = make_cheat(attack) if attack is Attack.FLATTERING_CUT else Prefilled(make_cheat(attack))
    changed = altered(cheat, claims, older, published, tmp_path)
    verdicts = judge([claims[n] for n in changed], [REQUESTS[n] for n in changed], models)
    assert reasons(verdicts) <= {SEED, None}
    passed = [verdict for verdict in verdicts if verdict.outcome is Outcome.ACCEPTED]
    assert len(passed) <= len(verdicts) / 4
    assert all(0.01 < verdict.metrics["seed_margin_max"] <= 0.6 for verdict in passed)
