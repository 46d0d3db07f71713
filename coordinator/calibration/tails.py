"""From a bound on false bans to a bound per rollout, and from a sample to the value that so few honest rollouts exceed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_BODY = 0.9  # the tail is what lies above this quantile
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
    """An exponential tail: P(X > x) = share · exp(-(x - start) / scale) for x ≥ start. `largest` was seen among `count`.

    `shape`: that of the generalized Pareto tail that fits best, as evidence. Around 0 or below, exponential is right or on
    the safe side; well above 0 means values that are not one kind of noise.
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
        return max(self.largest, self.start + self.scale * math.log(self.share / probability))


def fit_tail(values: Sequence[float], *, unit: float = 0.0) -> Tail:
    """Fit to the excesses over the 90 % quantile; the shape by probability-weighted moments (Hosking and Wallis 1987).

    Rounding noise is a sum of many small errors, whose tail is lighter than exponential; extrapolating from a few hundred
    values to one in millions by a fitted shape would turn the shape's own error into orders of magnitude. `unit`: of values
    that come in steps (counts, medians of whole numbers): they are spread evenly over a step above them, for ties have no
    tail. Raises ValueError for an empty sample.
    """
    if len(values) == 0:
        raise ValueError("no values to fit a tail to")
    sample = _spread(np.sort(np.asarray(values, dtype=np.float64)), unit)
    start, largest = float(np.quantile(sample, _BODY)), float(sample[-1])
    excesses = sample[sample > start] - start
    share = len(excesses) / len(sample)
    if len(excesses) < 2:
        return Tail(start, share, largest - start, 0.0, largest, len(sample))
    weights = 1 - (np.arange(1, len(excesses) + 1) - 0.35) / len(excesses)
    mean, weighted = float(excesses.mean()), float((excesses * weights).mean())
    shape = 2 - mean / (mean - 2 * weighted) if mean > 2 * weighted else 0.0
    return Tail(start, share, mean, shape, largest, len(sample))


def _spread(ascending: NDArray[np.float64], unit: float) -> NDArray[np.float64]:
    """Equal values, evenly over the step above them."""
    if unit == 0.0:
        return ascending
    _, starts, counts = np.unique(ascending, return_index=True, return_counts=True)
    within = np.arange(len(ascending)) - np.repeat(starts, counts)
    return ascending + unit * (within + 0.5) / np.repeat(counts, counts)
