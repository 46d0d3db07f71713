"""How long a step takes in each mode, predicted from the lengths' distribution, the slots and the training time. Pure.

    synchronous    E[makespan of the batch's groups over the slots] + train
    step-off-k     the same recurrence, batch b beginning when step b − k − 1 is done
    asynchronous   what `coordinator.plan` says: the larger of groups · mean / slots, and train

A batch that waits for its slowest group pays for the tail; a stream pays for the mean. The same formulas go by a shape, before
anything ran (`Inputs.of`), and by what a run itself measured of its parts.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from coordinator.plan import Load, plan

_DRAWS = 400
_LEAST = 1e-9  # seconds; the planner takes nothing that is 0


@dataclass(frozen=True, slots=True)
class Shape:
    """`groups` per batch on `slots` that generate one group each at a time; seconds that a step's training takes.

    Generation times are log-normal: median seconds and the standard deviation of the logarithm (1.0 makes the longest of
    32 some eight times the median, as published for long reasoning).
    """

    groups: int = 16
    slots: int = 16
    train_s: float = 0.06
    median_s: float = 0.06
    sigma: float = 1.0

    def times(self, count: int, rng: random.Random) -> list[float]:
        """Seconds that so many groups take."""
        return [self.median_s * rng.lognormvariate(0.0, self.sigma) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a plan is computed from. `train_s`: of a step. `times`: seconds that groups took, or would take, to draw from."""

    groups: int
    slots: int
    train_s: float
    times: tuple[float, ...]

    @classmethod
    def of(cls, shape: Shape) -> Inputs:
        """Before anything is measured."""
        times = shape.times(_DRAWS * shape.groups, random.Random(0))
        return cls(shape.groups, shape.slots, shape.train_s, tuple(times))


def makespan(times: Sequence[float], slots: int) -> float:
    """When the last is done, if each slot takes the next as soon as it is free."""
    free = [0.0] * slots
    heapq.heapify(free)
    for seconds in times:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def predict(inputs: Inputs, mode: str, k: int = 0) -> float:
    """Seconds per step after warm-up. `mode`: synchronous, step_off (with `k`), asynchronous."""
    if mode == "asynchronous":
        # A slot is a worker that makes one unit of length per second; nothing waits for verification here.
        mean, train_s = max(fmean(inputs.times), _LEAST), max(inputs.train_s, _LEAST)
        load = Load(inputs.groups, train_s, 1.0, mean, verifier_rate=1.0 / _LEAST)
        return plan(load, workers=inputs.slots, verifiers=1).step_s
    rng = random.Random(0)
    draws = [rng.choices(inputs.times, k=inputs.groups) for _ in range(_DRAWS)]
    if mode == "synchronous":
        return fmean(makespan(times, inputs.slots) for times in draws) + inputs.train_s
    return _step_off(inputs, draws, k)


def _step_off(inputs: Inputs, draws: Sequence[Sequence[float]], k: int) -> float:
    """Batch b may begin when step b − k − 1 is done, and is trained on when all of it is there, in order."""
    free = [0.0] * inputs.slots
    heapq.heapify(free)
    done = [0.0] * (len(draws) + 1)  # when step b is done, at b + 1
    for batch, times in enumerate(draws):
        begin = done[max(0, batch - k)]
        ready = 0.0
        for seconds in times:
            start = max(free[0], begin)
            heapq.heapreplace(free, start + seconds)
            ready = max(ready, start + seconds)
        done[batch + 1] = max(done[batch], ready) + inputs.train_s
    half = len(draws) // 2
    return (done[-1] - done[half]) / (len(draws) - half)
