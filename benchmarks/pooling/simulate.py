"""Workers whose rollouts are drawn, with replacement, from measured ones: when do the tests alarm?

Shapes: W workers, J stakes, R measured rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.pooling.measure import Measured
from coordinator.verification.pooled import NUMERIC, STRIKE, Pooled, PooledTest
from coordinator.verification.pooling import STAKES, advance, alarm_level, mixed, normalised

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Delay:
    """Tokens until the first alarm of a test that bans; NaN quantiles if too few workers alarmed in time."""

    median_tokens: float
    p90_tokens: float
    median_rollouts: float
    alarmed: float
    first_test: str


def delays(measured: Sequence[Measured], pooled: Pooled, *, workers: int, rollouts_max: int, seed: int = 0) -> Delay:
    """How many tokens cheats hand in until the first alarm."""
    draw = np.random.default_rng(seed)
    tests = [test for test in pooled.tests if test.name in NUMERIC and test.action == STRIKE]
    values = {test.name: _values(measured, test) for test in tests}
    tokens_R = np.array([each.tokens for each in measured])
    bets = {test.name: np.zeros((workers, len(STAKES))) for test in tests}
    spent_W, done_W = np.zeros(workers), np.full(workers, np.nan)
    rollouts_W = np.full(workers, np.nan)
    firsts: dict[str, int] = {}
    for number in range(rollouts_max):
        drawn_W = draw.integers(0, len(measured), workers)
        spent_W += tokens_R[drawn_W]
        for test in tests:
            bets[test.name] = _observed(bets[test.name], values[test.name][drawn_W])
            alarms_W = (mixed(bets[test.name]) >= alarm_level(test, pooled)) & np.isnan(done_W)
            done_W[alarms_W], rollouts_W[alarms_W] = spent_W[alarms_W], number + 1
            firsts[test.name] = firsts.get(test.name, 0) + int(alarms_W.sum())
        if not np.isnan(done_W).any():
            break
    late_W = np.where(np.isnan(done_W), np.inf, done_W)
    return Delay(
        median_tokens=float(np.quantile(late_W, 0.5, method="higher")),
        p90_tokens=float(np.quantile(late_W, 0.9, method="higher")),
        median_rollouts=float(np.quantile(np.where(np.isnan(rollouts_W), np.inf, rollouts_W), 0.5, method="higher")),
        alarmed=float(np.isfinite(late_W).mean()),
        first_test=max(firsts, key=lambda name: firsts[name]) if firsts else "",
    )


def false_alarms(
    measured: Sequence[Measured], pooled: Pooled, *, months: int, rollouts_per_month: int, seed: int = 1
) -> dict[str, int]:
    """Alarms by test in so many worker-months of honest workers, the alarm level being that of such a month."""
    draw = np.random.default_rng(seed)
    pooled = replace(pooled, observations_per_month=float(rollouts_per_month))
    tests = [test for test in pooled.tests if test.name in NUMERIC]
    values = {test.name: _values(measured, test) for test in tests}
    bets = {test.name: np.zeros((months, len(STAKES))) for test in tests}
    alarms = dict.fromkeys(values, 0)
    for _ in range(rollouts_per_month):
        drawn_W = draw.integers(0, len(measured), months)
        for test in tests:
            now = _observed(bets[test.name], values[test.name][drawn_W])
            alarmed_W = mixed(now) >= alarm_level(test, pooled)
            alarms[test.name] += int(alarmed_W.sum())
            now[alarmed_W] = 0.0
            bets[test.name] = now
    return alarms


def _values(measured: Sequence[Measured], test: PooledTest) -> Floats:
    """[R] Y of each rollout; NaN where it was rejected (it strikes already) or has none."""
    found = [normalised(test, each.statistics) if each.accepted else None for each in measured]
    return np.array([np.nan if value is None else value for value in found])


def _observed(bets_WJ: Floats, values_W: Floats) -> Floats:
    """Only workers that have an observation go on."""
    seen_W = ~np.isnan(values_W)
    return np.where(seen_W[:, None], advance(bets_WJ, np.where(seen_W, values_W, 1.0)), bets_WJ)
