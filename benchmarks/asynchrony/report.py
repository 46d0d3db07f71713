"""What the runs say together: means, deviations from the plan, speed-up, and the paired difference of rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, stdev
from typing import Any

from benchmarks.asynchrony.planner import Inputs, Shape, predict
from benchmarks.asynchrony.run import Measured

# 95th percentile of Student's t by degrees of freedom from 1: a two-sided 90 % interval of a mean.
_T = (
    *(6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812),
    *(1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725),
    *(1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699, 1.697),
)
_NUMBERS = ("step_s", "overlap", "idle_slots", "idle_trainer", "staleness")


def interval(values: Sequence[float]) -> list[float]:
    """[mean, low, high] with a 90 % interval by Student's t (beyond 30 degrees of freedom slightly wide)."""
    mean = fmean(values)
    if len(values) < 2:
        return [mean, mean, mean]
    half = _T[min(len(values) - 1, len(_T)) - 1] * stdev(values) / math.sqrt(len(values))
    return [mean, mean - half, mean + half]


def times(shape: Shape, k: int, timed: Mapping[str, Sequence[Measured]]) -> dict[str, Any]:
    """How fast, for the line of JSON. `timed`: by mode, one for each seed."""
    pairs = zip(timed["synchronous"], timed["asynchronous"], strict=True)
    return {
        "shape": asdict(shape),
        "k": k,
        "seeds": len(timed["synchronous"]),
        "modes": {name: of_mode(shape, name, k, runs) for name, runs in timed.items()},
        "speedup": interval([sync.step_s / asynchronous.step_s for sync, asynchronous in pairs]),
    }


def learnt(rewards: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """How well, for the line of JSON. `rewards`: by mode, one for each seed."""
    pairs = zip(rewards["synchronous"], rewards["asynchronous"], strict=True)
    return {
        "reward_seeds": len(rewards["synchronous"]),
        "rewards": {name: interval(each) for name, each in rewards.items()},
        "reward_difference": interval([asynchronous - sync for sync, asynchronous in pairs]),
    }


def of_mode(shape: Shape, name: str, k: int, runs: Sequence[Measured]) -> dict[str, Any]:
    """Means, and how far the steps were from their plans.

    `planned_step_s`: from the shape alone. `deviation`: of each run's steps from the plan by what that run's own groups and
    trainings took, so that neither the luck of its lengths nor a slow machine is laid at the formula's door.
    """
    means: dict[str, Any] = {what: fmean(getattr(run, what) for run in runs) for what in _NUMBERS}
    means["planned_step_s"] = predict(Inputs.of(shape), name, k)
    means["deviation"] = interval([run.step_s / predict(run.inputs, name, k) - 1.0 for run in runs])
    return means


def line(name: str, found: Mapping[str, Any]) -> str:
    """A mode's row, for a person."""
    mean, low, high = (f"{100 * value:+.1f}" for value in found["deviation"])
    return (
        f"{name:13} {1000 * found['step_s']:7.1f} ms/step (planned {1000 * found['planned_step_s']:7.1f}; "
        f"{mean} % [{low}, {high}] from the plan by its own times)  overlap {found['overlap']:.2f}  "
        f"idle: slots {found['idle_slots']:.0%}, trainer {found['idle_trainer']:.0%}  staleness {found['staleness']:.1f}"
    )
