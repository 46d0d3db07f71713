"""Tests by betting: what they promise to honest workers, what they find, and that honesty can't be banked."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from coordinator.verification.pooled import ALERT, PROOF_MANTISSA, SEED_MARGIN, STRIKE, Pooled, PooledClass, PooledTest
from coordinator.verification.pooling import (
    STAKES,
    Evidence,
    Statistic,
    advance,
    alarm_level,
    calibrate,
    is_alarmed,
    is_common,
    mixed,
    normalised,
    observe,
    restarted,
    scaled,
)

TEST = PooledTest(PROOF_MANTISSA, STRIKE, 0.01, (PooledClass(1, 1.0, 3.0, 9.0), PooledClass(32, 1.0, 2.0, 5.0)))
POOLED = Pooled(1000.0, 0.5, 0.15, (TEST,), "made up")


def alarms(values_NW: np.ndarray, pooled: Pooled = POOLED) -> np.ndarray:
    """[W] how often each of W workers is alarmed over N observations; an alarm begins again."""
    (test,) = pooled.tests
    bets_WJ = np.zeros((values_NW.shape[1], len(STAKES)))
    count_W = np.zeros(values_NW.shape[1], dtype=int)
    for values_W in values_NW:
        bets_WJ = advance(bets_WJ, values_W)
        alarmed_W = mixed(bets_WJ) >= alarm_level(test, pooled)
        count_W += alarmed_W
        bets_WJ[alarmed_W] = 0.0
    return count_W


def run_of(values: list[float], evidence: Evidence | None = None) -> Evidence:
    evidence = evidence or Evidence(PROOF_MANTISSA)
    for value in values:
        evidence = observe(evidence, value, 10)
    return evidence


def first_alarm(values: list[float], evidence: Evidence | None = None) -> int:
    """After how many observations it is alarmed."""
    evidence = evidence or Evidence(PROOF_MANTISSA)
    for number, value in enumerate(values, start=1):
        evidence = observe(evidence, value, 10)
        if is_alarmed(evidence, TEST, POOLED):
            return number
    raise AssertionError("no alarm")


@pytest.mark.parametrize("shape", ["coin", "heavy tail", "exponential"])
def test_honest_workers_at_the_bound_are_alarmed_no_more_often_than_promised(shape: str) -> None:
    # Exactly at the bound of the mean, which is the worst that an honest worker may be; a level that is reached at times.
    draw = np.random.default_rng(0)
    months, per_month = 2000, 200
    size = (per_month, months)
    values_NW = {
        "coin": lambda: 2.0 * draw.integers(0, 2, size),
        "heavy tail": lambda: 10.0 * (draw.random(size) < 0.1),
        "exponential": lambda: draw.exponential(1.0, size),
    }[shape]()
    pooled = replace(POOLED, observations_per_month=float(per_month), tests=(replace(TEST, alpha=0.5),))
    per_worker_month = float(alarms(values_NW, pooled).mean())
    assert 0.001 < per_worker_month <= 0.5, "the promise holds, and the trial was one that could break it"


def test_the_promise_holds_for_values_that_depend_on_the_past() -> None:
    # A worker that plays high when the evidence is low and low when it is high, with the right mean each time.
    draw = np.random.default_rng(1)
    bets_WJ = np.zeros((2000, len(STAKES)))
    count = 0
    pooled = replace(POOLED, observations_per_month=200.0, tests=(replace(TEST, alpha=0.5),))
    for _ in range(200):
        spread_W = np.where(mixed(bets_WJ) > 2.0, 8.0, 1.5)
        bets_WJ = advance(bets_WJ, spread_W * (draw.random(2000) < 1.0 / spread_W))
        alarmed_W = mixed(bets_WJ) >= alarm_level(pooled.tests[0], pooled)
        count += int(alarmed_W.sum())
        bets_WJ[alarmed_W] = 0.0
    assert 0 < count / 2000 <= 0.5


def test_a_small_excess_is_found_and_a_larger_one_sooner() -> None:
    draw = np.random.default_rng(2)
    noise = draw.normal(0.0, 0.3, 400)
    delays = [first_alarm([max(0.0, mean + each) for each in noise]) for mean in (1.2, 1.5, 2.0)]
    assert delays == sorted(delays, reverse=True)
    assert delays[-1] < 30 and delays[0] < 400


def test_honesty_cannot_be_banked() -> None:
    cheating = [1.5] * 200
    banked = run_of([0.3] * 5000)
    assert first_alarm(cheating, banked) <= first_alarm(cheating), "a long honest life delays nothing"


def test_evidence_is_bounded_below_and_counts() -> None:
    evidence = run_of([0.0] * 50)
    assert 0.0 <= evidence.log_e < math.log(2 / STAKES[0] + 1), "one game begins with each observation"
    assert (evidence.observations, evidence.tokens) == (50, 500)
    again = restarted(evidence)
    assert (again.log_e, again.observations, again.tokens) == (0.0, 50, 500)


def test_the_alarm_level_is_observations_per_month_over_alpha() -> None:
    assert alarm_level(TEST, POOLED) == pytest.approx(math.log(1.0 + 1000.0 / 0.01))
    low, high = Evidence(TEST.name, (11.5,) * len(STAKES)), Evidence(TEST.name, (11.6,) * len(STAKES))
    assert not is_alarmed(low, TEST, POOLED) and is_alarmed(high, TEST, POOLED)


def test_evidence_survives_the_largest_values() -> None:
    assert math.isfinite(run_of([1e6] * 200).log_e)


@pytest.mark.parametrize(
    ("value", "expected"), [(0.0, 0.0), (1.0, 0.0), (2.0, 0.5), (3.0, 1.0), (9.0, 4.0), (1e9, 4.0)]
)
def test_a_number_is_clipped_and_scaled_to_its_bound(value: float, expected: float) -> None:
    assert scaled(TEST.classes[0], value) == expected


def test_numbers_are_held_to_their_length_class_and_averaged() -> None:
    chunks = [Statistic(PROOF_MANTISSA, 3.0, 5), Statistic(PROOF_MANTISSA, 3.0, 32), Statistic(SEED_MARGIN, 99.0, 5)]
    assert normalised(TEST, chunks) == pytest.approx((1.0 + 2.0) / 2)
    assert normalised(TEST, chunks[2:]) is None, "what is not there is not judged"
    assert normalised(TEST, [Statistic(PROOF_MANTISSA, math.nan, 5)]) is None


def test_calibrated_bounds_hold_for_every_engine_and_leave_room() -> None:
    draw = np.random.default_rng(3)
    engines = [draw.gamma(20.0, 0.05, 400), draw.gamma(20.0, 0.06, 400)]
    bounds = calibrate(engines, tokens_min=5, headroom=1.1, resolution=0.01)
    assert bounds.tokens_min == 5 and bounds.floor < bounds.mean < bounds.cap
    test = PooledTest(PROOF_MANTISSA, ALERT, 0.01, (replace(bounds, tokens_min=1),))
    for values in engines:
        found = [normalised(test, [Statistic(PROOF_MANTISSA, float(value), 8)]) for value in values]
        assert np.mean(np.array(found, dtype=float)) < 1.0
    assert bounds.mean == pytest.approx(1.1 * 1.2, rel=0.1)


def test_exact_agreement_still_leaves_room_for_rounding() -> None:
    bounds = calibrate([[0.0] * 50], tokens_min=1, headroom=1.1, resolution=0.2)
    assert (bounds.floor, bounds.mean, bounds.cap) == (0.0, 0.2, 0.8)


@pytest.mark.parametrize(
    ("levels", "expected"),
    [([1.0], False), ([1.0, 1.0], False), ([1.0, 0.3, 0.0], True), ([1.0, 0.1, 0.0], False), ([1.0, 0.3, 0, 0], False)],
)
def test_what_most_workers_show_is_a_matter_of_the_bounds(levels: list[float], expected: bool) -> None:
    assert is_common(levels, watch=0.5) is expected
