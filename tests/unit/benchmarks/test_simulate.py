"""The simulation behind the figures: cheats are found in as many tokens as they hand in, honest workers are let be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.verification.measured import Measured
from benchmarks.verification.simulate import FRAUD, STRIKES, Delay, delays, false_alarms, median_interval
from coordinator.verification.pooled import PROOF_MANTISSA, STRIKE, PooledClass, PooledTest
from coordinator.verification.pooling import Statistic
from tests.thresholds import BY_HAND_POOLED

POOLED = replace(BY_HAND_POOLED, tests=(PooledTest(PROOF_MANTISSA, STRIKE, 0.01, (PooledClass(1, 0.0, 1.2, 9.0),)),))


def rollouts(mean: float, *, accepted: bool = True) -> list[Measured]:
    draw = np.random.default_rng(0)
    return [
        Measured(10, "" if accepted else "proof", (Statistic(PROOF_MANTISSA, float(value), 10),))
        for value in draw.gamma(16.0, mean / 16.0, 60)
    ]


def test_a_cheat_is_found_and_tokens_are_those_handed_in() -> None:
    found = delays(rollouts(2.0), POOLED, workers=50, rollouts_max=500)
    assert found.banned == 1.0 and found.by == PROOF_MANTISSA
    assert found.median_tokens == 10 * found.median_rollouts <= found.p90_tokens


def test_an_honest_worker_is_let_be() -> None:
    found = delays(rollouts(0.9), POOLED, workers=20, rollouts_max=100, max_strikes=3)
    assert (found.banned, found.by) == (0.0, "") and math.isinf(found.median_tokens)


def test_rejected_rollouts_strike_and_the_tests_see_the_others() -> None:
    refused = rollouts(5.0, accepted=False)
    found = delays(refused, POOLED, workers=20, rollouts_max=100, max_strikes=3)
    assert (found.by, found.median_rollouts) == (STRIKES, 3)
    assert delays(refused, POOLED, workers=20, rollouts_max=100).by == PROOF_MANTISSA, "the tests alone see all"


@pytest.mark.parametrize(("mean", "expected"), [(0.9, False), (2.0, True)])
def test_false_alarms_are_counted_per_month(mean: float, expected: bool) -> None:
    alarms = false_alarms(rollouts(mean), POOLED, months=50, rollouts_per_month=100)
    assert (alarms[PROOF_MANTISSA] > 0) is expected


def test_fraud_bans_at_once() -> None:
    found = delays(
        rollouts(5.0, accepted=False), POOLED, workers=20, rollouts_max=10, max_strikes=3, fraud=frozenset({"proof"})
    )
    assert (found.by, found.median_rollouts) == (FRAUD, 1)


def test_the_interval_of_the_median_holds_the_median() -> None:
    measured = rollouts(2.0)

    def delay(drawn: Sequence[Measured], workers: int) -> Delay:
        return delays(drawn, POOLED, workers=workers, rollouts_max=500)

    low, high = median_interval(measured, delay)
    assert low <= delay(measured, 100).median_tokens <= high < 5 * low
