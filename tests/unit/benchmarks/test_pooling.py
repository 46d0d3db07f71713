"""The simulation behind the figures: cheats are found in as many tokens as they hand in, honest workers are let be."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.pooling import store
from benchmarks.pooling.measure import Measured
from benchmarks.pooling.simulate import STRIKES, delays, false_alarms
from coordinator.verification.pooled import DEFAULT_POOLED, PROOF_MANTISSA, STRIKE, PooledClass, PooledTest
from coordinator.verification.pooling import Statistic

POOLED = replace(DEFAULT_POOLED, tests=(PooledTest(PROOF_MANTISSA, STRIKE, 0.01, (PooledClass(1, 0.0, 1.2, 9.0),)),))


def rollouts(mean: float, *, accepted: bool = True) -> list[Measured]:
    draw = np.random.default_rng(0)
    return [
        Measured(10, accepted, (Statistic(PROOF_MANTISSA, float(value), 10),), 0, 0)
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


def test_measured_rollouts_survive_a_file(tmp_path: Path) -> None:
    measured = {"bf16": rollouts(1.0)[:3]}
    store.save(tmp_path / "measured.json", measured)
    assert store.load(tmp_path / "measured.json") == measured
