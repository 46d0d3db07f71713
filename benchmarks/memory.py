"""Whether a process's memory grows: the slope of its resident size over time, with its uncertainty. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_BLOCKS = 12  # neighbouring samples are alike: means of blocks are nearly independent
_TWO_SIDED_95 = 2.23  # Student's t with _BLOCKS − 2 degrees of freedom
_GROWTH_PER_HOUR = 0.05  # of the median size: below this a day's growth is not worth a person's time


@dataclass(frozen=True, slots=True)
class Slope:
    """Bytes per hour, and half the width of its 95 % interval. `median`: of the sizes, in bytes."""

    per_hour: float
    uncertainty: float
    median: float

    @property
    def leaks(self) -> bool:
        """Whether the whole interval lies above what is tolerated."""
        return self.per_hour - self.uncertainty > _GROWTH_PER_HOUR * self.median


def slope(samples: Sequence[tuple[float, float]]) -> Slope | None:
    """Least squares through block means of (seconds, bytes), the first fifth left out as warm-up; None for too few."""
    steady = list(samples)[len(samples) // 5 :]
    if len(steady) < 2 * _BLOCKS:
        return None
    size = len(steady) / _BLOCKS
    blocks = [steady[round(number * size) : round((number + 1) * size)] for number in range(_BLOCKS)]
    times = [_mean([time for time, _ in block]) / 3600 for block in blocks]
    sizes = [_mean([bytes_ for _, bytes_ in block]) for block in blocks]
    mean_time, mean_size = _mean(times), _mean(sizes)
    spread = sum((time - mean_time) ** 2 for time in times)
    per_hour = sum((time - mean_time) * (size - mean_size) for time, size in zip(times, sizes, strict=True)) / spread
    rest = [size - mean_size - per_hour * (time - mean_time) for time, size in zip(times, sizes, strict=True)]
    error = math.sqrt(sum(value**2 for value in rest) / (_BLOCKS - 2) / spread)
    ordered = sorted(bytes_ for _, bytes_ in steady)
    return Slope(per_hour, _TWO_SIDED_95 * error, ordered[len(ordered) // 2])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
