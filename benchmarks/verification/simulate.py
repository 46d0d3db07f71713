"""Workers whose rollouts are drawn, with replacement, from measured ones: when do the tests alarm?

Shapes: W workers, J stakes, R measured rollouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.verification.measured import Measured
from coordinator.verification.pooled import NUMERIC, STRIKE, Pooled, PooledTest
from coordinator.verification.pooling import STAKES, advance, alarm_level, mixed, normalised

Floats = NDArray[np.float64]


STRIKES, FRAUD = "strikes", "fraud"
_RESAMPLES = 40
_WORKERS_PER_RESAMPLE = 60


@dataclass(frozen=True, slots=True)
class Delay:
    """Tokens until a worker is banned; infinite quantiles if too few were in time. `banned`: share of workers that were.
    `by`: what banned most of them, a test, `STRIKES` or `FRAUD`."""

    median_tokens: float
    p90_tokens: float
    median_rollouts: float
    banned: float
    by: str


def delays(
    measured: Sequence[Measured],
    pooled: Pooled,
    *,
    workers: int,
    rollouts_max: int,
    max_strikes: int | None = None,
    fraud: frozenset[str] = frozenset(),
    seed: int = 0,
) -> Delay:
    """How many tokens cheats hand in until they are banned.

    With `max_strikes`, as a run does it: rejected rollouts strike, those for a reason of `fraud` ban at once, and the tests
    see the others. Without, the tests alone see all rollouts: what a cheat would be up against that no single-rollout check
    finds.
    """
    draw = np.random.default_rng(seed)
    tests = [test for test in pooled.tests if test.name in NUMERIC and test.action == STRIKE]
    values = {test.name: _values(measured, test, accepted_only=max_strikes is not None) for test in tests}
    tokens_R = np.array([each.tokens for each in measured])
    rejected_R = np.array([not each.accepted for each in measured])
    fraud_R = np.array([each.reason in fraud for each in measured])
    bets = {test.name: np.zeros((workers, len(STAKES))) for test in tests}
    spent_W, strikes_W = np.zeros(workers), np.zeros(workers)
    done_W, rollouts_W = np.full(workers, np.inf), np.full(workers, np.inf)
    by: Counter[str] = Counter()
    for number in range(1, rollouts_max + 1):
        drawn_W = draw.integers(0, len(measured), workers)
        spent_W += tokens_R[drawn_W]
        strikes_W += rejected_R[drawn_W]
        found = {FRAUD: fraud_R[drawn_W], STRIKES: strikes_W >= (np.inf if max_strikes is None else max_strikes)}
        for test in tests:
            bets[test.name] = _observed(bets[test.name], values[test.name][drawn_W])
            found[test.name] = mixed(bets[test.name]) >= alarm_level(test, pooled)
        for name, found_W in found.items():
            new_W = found_W & np.isinf(done_W)
            done_W[new_W], rollouts_W[new_W] = spent_W[new_W], number
            by[name] += int(new_W.sum())
        if np.isfinite(done_W).all():
            break
    return Delay(
        median_tokens=float(np.quantile(done_W, 0.5, method="higher")),
        p90_tokens=float(np.quantile(done_W, 0.9, method="higher")),
        median_rollouts=float(np.quantile(rollouts_W, 0.5, method="higher")),
        banned=float(np.isfinite(done_W).mean()),
        by=by.most_common(1)[0][0] if by.total() else "",
    )


def median_interval(
    measured: Sequence[Measured], delay: Callable[[Sequence[Measured], int], Delay]
) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median tokens until a ban, the measured rollouts being the sample.

    `delay(rollouts, workers)` says how soon so many workers are banned that draw from those rollouts.
    """
    draw = np.random.default_rng(0)
    medians = sorted(
        delay(
            [measured[n] for n in draw.integers(0, len(measured), len(measured))], _WORKERS_PER_RESAMPLE
        ).median_tokens
        for _ in range(_RESAMPLES)
    )
    return medians[round(0.025 * (_RESAMPLES - 1))], medians[round(0.975 * (_RESAMPLES - 1))]


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


def _values(measured: Sequence[Measured], test: PooledTest, *, accepted_only: bool = True) -> Floats:
    """[R] Y of each rollout; NaN where it has none, or was rejected and `accepted_only`."""
    found = [normalised(test, each.statistics) if each.accepted or not accepted_only else None for each in measured]
    return np.array([np.nan if value is None else value for value in found])


def _observed(bets_WJ: Floats, values_W: Floats) -> Floats:
    """Only workers that have an observation go on."""
    seen_W = ~np.isnan(values_W)
    return np.where(seen_W[:, None], advance(bets_WJ, np.where(seen_W, values_W, 1.0)), bets_WJ)
