"""From a bound on false bans to a bound per rollout, and from a sample to the value that so few honest rollouts exceed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_BODY = 0.9  # the tail is what lies above this quantile
_SHAPE_MAX = 0.25
_ITERATIONS = 80


def poisson_at_least(count: int, mean: float) -> float:
    """P(N ≥ count) for a Poisson variable N."""
    below = sum(math.exp(-mean + k * math.log(mean) - math.lgamma(k + 1)) for k in range(count)) if mean > 0 else 1.0
    return max(0.0, 1.0 - below)


def strike_probability(*, false_bans: float, rollouts: float, max_strikes: int) -> float:
    """How often an honest rollout may fail, so that `max_strikes` failures among `rollouts` have probability
    `false_bans` at most. Strikes count as independent: what they are not, a second look in float32 has to catch."""
    if not 0 < false_bans < 1 or rollouts <= 0 or max_strikes < 1:
        raise ValueError("false_bans must be between 0 and 1, rollouts above 0, max_strikes at least 1")
    low, high = 0.0, 10.0 * max_strikes
    for _ in range(_ITERATIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if poisson_at_least(max_strikes, middle) <= false_bans else (low, middle)
    return min(1.0, low / rollouts)


@dataclass(frozen=True, slots=True)
class Tail:
    """A generalized Pareto tail: P(X > x) = share · (1 + shape · (x - start) / scale)^(-1 / shape) for x ≥ start.

    `shape` 0 means an exponential tail. `largest` was seen among `count` values.
    """

    start: float
    share: float
    scale: float
    shape: float
    largest: float
    count: int

    def exceeded_with(self, probability: float) -> float:
        """The value that is exceeded with this probability; never less than the largest seen."""
        if self.scale <= 0 or probability >= self.share:
            return self.largest
        ratio = self.share / probability
        grown = math.log(ratio) if self.shape == 0 else (ratio**self.shape - 1) / self.shape
        return max(self.largest, self.start + self.scale * grown)


def fit_tail(values: Sequence[float]) -> Tail:
    """Fit by probability-weighted moments (Hosking and Wallis 1987, eq. 7) to the excesses over the 90 % quantile.

    A shape below 0 (a tail that ends) is taken as 0, for a sample can't prove an end; above 1/4 it is cut, for heavier
    tails are steps between kinds of rollouts, not numerics. Raises ValueError for an empty sample.
    """
    if len(values) == 0:
        raise ValueError("no values to fit a tail to")
    sample = np.sort(np.asarray(values, dtype=np.float64))
    start, largest = float(np.quantile(sample, _BODY)), float(sample[-1])
    excesses = sample[sample > start] - start
    if len(excesses) < 2:
        return Tail(start, len(excesses) / len(sample), largest - start, 0.0, largest, len(sample))
    weights = 1 - (np.arange(1, len(excesses) + 1) - 0.35) / len(excesses)
    mean, weighted = float(excesses.mean()), float((excesses * weights).mean())
    shape = 2 - mean / (mean - 2 * weighted) if mean > 2 * weighted else 0.0
    shape = min(max(shape, 0.0), _SHAPE_MAX)
    return Tail(start, len(excesses) / len(sample), mean * (1 - shape), shape, largest, len(sample))
