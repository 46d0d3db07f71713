"""Sequential tests over a worker's rollouts: what one rollout can't show must show within a known number of them.

A statistic X of an honest rollout, clipped to [floor, cap], has a mean of at most `mean` (a bound that was measured, per
length class). Y = (X - floor) / (mean - floor) is then not negative and has a mean of at most 1, so that
L = 1 + λ (Y - 1) with 0 < λ < 1 is an honest worker's stake in a game that it can't win in the long run: E[L | past] ≤ 1
(testing by betting: Ville 1939; Shafer, "Testing by betting", 2021; Waudby-Smith and Ramdas, "Estimating means of bounded
random variables by betting", 2023). Which λ wins fastest depends on the cheat, so several bet side by side (`STAKES`), and
their mean counts.

A product of stakes would let a worker bank honesty: after a long honest time it is so close to 0 that a cheat goes unseen
for about as long. So a new game begins with every rollout, and all run on: M_n = L_n · (M_{n-1} + 1), the e-detector of
Shiryaev and Roberts (Shin, Ramdas, Rinaldo, "E-detectors: a nonparametric framework for sequential change detection",
2024). It forgets honesty: whatever came before, M_{n-1} ≥ 0, so that from its first rollout on a cheat is found no later
than if the worker had joined with it. Alarm: M_n ≥ threshold; M begins again at 0.

Guarantee. For an honest worker M_n + threshold · (alarms so far) - n is a supermartingale that begins at 0, since each
observation adds 1 and multiplies by L, and an alarm takes at least the threshold away. Hence, at any time n and for any
rule of stopping,

    expected number of false alarms within the first n observations ≤ n / threshold.

With threshold = (observations per month) / α that is at most α per worker-month and test, also as a probability (Markov).
A worker that does more rollouts a month than stated has proportionally more. Nothing is assumed of the distribution but
the bound on its mean, nor of when the tests are looked at.

What is kept per stake is log(1 + M), which is 0 at the beginning and grows by one `logaddexp`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from coordinator.verification.pooled import Pooled, PooledClass, PooledTest

STAKES = (0.05, 0.2, 0.5, 0.9)
_FEWEST_TO_COMPARE = 3

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Statistic:
    """One number of a rollout or a group for one test. `tokens`: how many it is of, which says its length class."""

    test: str
    value: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a test holds against a worker. `bets`: log(1 + M) per stake. `tokens`: of all `observations` together."""

    test: str
    bets: tuple[float, ...] = (0.0,) * len(STAKES)
    observations: int = 0
    tokens: int = 0

    @property
    def log_e(self) -> float:
        """log(1 + M) of all stakes together: 0 is nothing."""
        return _mixed(self.bets)


def normalised(test: PooledTest, statistics: Iterable[Statistic]) -> float | None:
    """Y of one rollout: the mean over its statistics for this test, each by its length class; 1 is the honest bound.

    None if there are none, or none that is finite and of a class that was measured.
    """
    values = [
        scaled(bounds, each.value)
        for each in statistics
        if each.test == test.name and math.isfinite(each.value) and (bounds := test.for_tokens(each.tokens)) is not None
    ]
    return sum(values) / len(values) if values else None


def scaled(bounds: PooledClass, value: float) -> float:
    """Y of one number."""
    return (min(max(value, bounds.floor), bounds.cap) - bounds.floor) / (bounds.mean - bounds.floor)


def advance(bets_WJ: Floats, values_W: Floats) -> Floats:
    """log(1 + M) of W workers' J stakes after one more observation Y each."""
    stakes_J = np.array(STAKES)
    return np.logaddexp(0.0, bets_WJ + np.log1p(stakes_J * (values_W[..., None] - 1.0)))


def mixed(bets_WJ: Floats) -> Floats:
    """log(1 + M), where M is the mean over the stakes."""
    return np.logaddexp.reduce(bets_WJ, axis=-1) - math.log(bets_WJ.shape[-1])


@lru_cache(maxsize=4096)
def _mixed(bets: tuple[float, ...]) -> float:
    """`mixed` of one worker, whose evidence is asked for many times between two observations."""
    return float(mixed(np.array(bets)))


def observe(evidence: Evidence, value: float, tokens: int) -> Evidence:
    """Evidence after an observation Y of that many tokens."""
    bets = advance(np.array(evidence.bets), np.array(value))
    return replace(
        evidence,
        bets=tuple(map(float, bets)),
        observations=evidence.observations + 1,
        tokens=evidence.tokens + tokens,
    )


def alarm_level(test: PooledTest, pooled: Pooled) -> float:
    """The log(1 + M) from which on the test alarms."""
    return math.log1p(pooled.observations_per_month / test.alpha)


def is_alarmed(evidence: Evidence, test: PooledTest, pooled: Pooled) -> bool:
    return evidence.log_e >= alarm_level(test, pooled)


def is_common(levels: Sequence[float], watch: float) -> bool:
    """Whether a test's evidence stands against most workers at once: then it is the bounds that are wrong (a policy that
    has changed since they were measured, an engine that was not), and nobody may be banned for them.

    `levels`: each active worker's log(1 + M) as a share of the alarm level, the alarmed one's included; at least three.
    """
    return len(levels) >= _FEWEST_TO_COMPARE and 2 * sum(level >= watch / 2 for level in levels) > len(levels)


def restarted(evidence: Evidence) -> Evidence:
    """After an alarm: the games begin again, the counts go on."""
    return replace(evidence, bets=Evidence(evidence.test).bets)


def calibrate(
    by_setting: Sequence[Sequence[float]], *, tokens_min: int, headroom: float, resolution: float
) -> PooledClass:
    """Bounds of one length class from honest measurements, one sequence per setting (each at least two numbers).

    The floor is the lowest of the settings' 10 % quantiles: the nearer it is to the mean, the more is a small excess worth.
    The cap bounds what a single rollout can say. `mean` is the largest of the settings' means of the clipped numbers and
    two standard errors, times `headroom` for settings that were not measured, and above the floor by `resolution` at least.
    """
    samples = [np.asarray(values, dtype=np.float64) for values in by_setting]
    floor = min(float(np.quantile(values, 0.1)) for values in samples)
    cap = floor + 3.0 * max(float(np.quantile(values, 0.99)) - floor for values in samples)
    bound = 0.0
    for values in samples:
        clipped = np.clip(values, floor, cap)
        bound = max(bound, float(clipped.mean() + 2.0 * clipped.std(ddof=1) / math.sqrt(len(clipped))))
    mean = max(headroom * bound, floor + resolution)
    return PooledClass(tokens_min, floor, mean, max(cap, floor + 4.0 * (mean - floor)))
