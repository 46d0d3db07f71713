"""What one short rollout can't show is there in the numbers of many: means over rollouts, cheat against honest.

Sequential tests over a worker's rollouts decide by such numbers; here a plain comparison of means shows that there is
something to decide by, and what a cheat that stays inside every threshold can gain.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import numpy as np
import pytest

from coordinator.verification.resident import ResidentModels
from protocol.rollout import Outcome, RejectionReason, Verdict
from tests.adversary.attacks import Attack, Cheat, make_cheat
from tests.adversary.attacks.choices import NearTies
from tests.adversary.attacks.prefilled import Prefilled
from tests.adversary.attacks.registry import even, share_of_even
from tests.adversary.batch import write_all
from tests.adversary.judging import judge, make_requests, reasons, separation, values
from worker.engine import Generation, Weights

ROLLOUTS = 48
STANDARD_ERRORS = 5.0  # chance alone: less than one in a million
REQUESTS = make_requests(ROLLOUTS, first=1000)
SHOWN_BY = {
    Attack.NOISE_1: ("proof_mantissa_mean", "logprob_gap_median"),
    Attack.INT8: ("proof_mantissa_mean", "logprob_gap_median"),
    Attack.INT6: ("proof_mantissa_mean", "logprob_gap_median", "seed_margin_mean"),
    Attack.NEAR_TIES: ("seed_margin_mean",),
}


@pytest.fixture(scope="module")
def honest(published: Weights, models: ResidentModels, tmp_path_factory: pytest.TempPathFactory) -> list[Verdict]:
    return judge(write_all(Cheat(), REQUESTS, published, tmp_path_factory.mktemp("scratch")), REQUESTS, models)


@pytest.mark.parametrize("attack", SHOWN_BY)
def test_what_passes_one_by_one_is_above_honest_by_the_mean(
    attack: Attack, honest: list[Verdict], published: Weights, models: ResidentModels, tmp_path: Path
) -> None:
    verdicts = judge(write_all(make_cheat(attack), REQUESTS, published, tmp_path), REQUESTS, models)
    assert sum(verdict.outcome is Outcome.ACCEPTED for verdict in verdicts) > ROLLOUTS / 2, "one by one they pass"
    for metric in SHOWN_BY[attack]:
        assert separation(values(verdicts, metric), values(honest, metric)) > STANDARD_ERRORS, metric


def test_rounded_weights_with_the_right_models_proofs_lose_the_draw_or_are_measurable(
    honest: list[Verdict], published: Weights, models: ResidentModels, tmp_path: Path
) -> None:
    cheat = Prefilled(make_cheat(Attack.INT6))
    verdicts = judge(write_all(cheat, REQUESTS, published, tmp_path), REQUESTS, models)
    assert reasons(verdicts) <= {None, RejectionReason.SEED}
    assert separation(values(verdicts, "seed_margin_mean"), values(honest, "seed_margin_mean")) > STANDARD_ERRORS


@pytest.mark.parametrize("margin", [0.05, 0.23])
def test_steering_near_ties_multiplies_the_odds_of_a_token_by_at_most_e_to_the_margin(
    margin: float, published: Weights, tmp_path: Path
) -> None:
    """Taking a paying token that loses by at most δ is drawing with δ more on its logit, whose odds are then e^δ times.

    So a token that pays with probability p pays with p e^δ / (1 - p + p e^δ): 0.557 for p = 0.5 and δ = 0.23.
    """
    fair = _paid(write_all(Cheat(), REQUESTS, published, tmp_path))
    steered = _paid(write_all(NearTies(margin, even), REQUESTS, published, tmp_path))
    p = statistics.fmean(fair)
    bound = p * math.exp(margin) / (1 - p + p * math.exp(margin))
    error = 4 * (math.sqrt(0.25 / len(fair)) + math.sqrt(0.25 / len(steered)))
    assert p - error < statistics.fmean(steered) < bound + error


def test_steering_by_more_than_the_margin_is_refused_and_the_sum_bounds_the_rest(
    published: Weights, models: ResidentModels, tmp_path: Path
) -> None:
    greedy = judge(write_all(NearTies(2.0, even), REQUESTS, published, tmp_path), REQUESTS, models)
    assert reasons([v for v in greedy if v.metrics.get("seed_margin_max", 0) > 0.6]) == {RejectionReason.SEED}
    at_the_margin = judge(write_all(NearTies(0.6, even), REQUESTS, published, tmp_path), REQUESTS, models)
    spent = [v.metrics["seed_margin_mean"] for v in at_the_margin if v.outcome is Outcome.ACCEPTED]
    refused = sum(v.reason is RejectionReason.SEED for v in at_the_margin)
    assert refused >= ROLLOUTS / 2, "whoever takes every near-tie spends more than the sum admits"
    assert max(spent, default=0.0) <= 0.6 + 0.01


def test_an_adjacent_version_claimed_as_new_is_accepted_only_where_it_is_the_same_draw(
    published: Weights, models: ResidentModels, tmp_path: Path
) -> None:
    """Weights as an optimizer's step leaves them (0.1 % off, so that about 1 % of the bf16 words differ)."""
    from tests.adversary.attacks.weights import noise

    claimed = write_all(Cheat(), REQUESTS, published, tmp_path)
    stale = write_all(noise(1e-3), REQUESTS, published, tmp_path)
    verdicts = judge(stale, REQUESTS, models)
    assert all(verdict.outcome is Outcome.ACCEPTED for verdict in verdicts), "the versions can't be told apart"
    differ = [n for n in range(len(stale)) if stale[n].token_ids != claimed[n].token_ids]
    assert 0 < len(differ) < len(stale) / 2, "the noise is there, and most draws are the same all the same"
    margins = [verdicts[n].metrics["seed_margin_max"] for n in differ]
    assert all(margin < 0.1 for margin in margins), "the others are near-ties that rounding decides, too"


def _paid(generations: list[Generation]) -> list[float]:
    """1.0 for each token that pays."""
    return [float(paid) for g in generations for paid in even(np.array(g.token_ids))]


def test_the_best_of_n_within_the_rules_is_the_same_draw_again(published: Weights, tmp_path: Path) -> None:
    """Abandoning a bad sample and leasing it again gives its seed again: under one version, the same tokens."""
    first, again = (write_all(Cheat(), REQUESTS, published, tmp_path) for _ in range(2))
    assert [g.token_ids for g in first] == [g.token_ids for g in again]


def test_choosing_a_version_or_a_border_buys_a_draw_per_version_and_no_more(
    published: Weights, models: ResidentModels, tmp_path: Path
) -> None:
    """Within the rules: every admissible version is a draw of its own where the versions differ at all."""
    from tests.adversary.attacks.weights import noise

    draws = [write_all(Cheat(), REQUESTS, published, tmp_path)]
    draws += [write_all(noise(share), REQUESTS, published, tmp_path) for share in (1e-3, 1.5e-3)]
    distinct = [len({generation.token_ids for generation in drawn}) for drawn in zip(*draws, strict=True)]
    assert 1.0 < statistics.fmean(distinct) < 2.0, "versions of one run draw alike more often than not"
    fair = statistics.fmean(share_of_even(generation) for generation in draws[0])
    best = statistics.fmean(max(map(share_of_even, drawn)) for drawn in zip(*draws, strict=True))
    assert fair <= best < fair + 0.05
