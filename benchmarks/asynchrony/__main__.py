"""`python -m benchmarks.asynchrony`: synchronous, step-off-k and asynchronous, against the planner. Ends with a line of JSON.

Engines and the rest of the training sleep, so that no mode is short of cores; see `run`. With `--train-s 0` and a median of
what an engine really takes, it says what a faster trainer would bring.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from dataclasses import asdict
from statistics import fmean, stdev
from typing import Any

import torch

from benchmarks.asynchrony.planner import Shape, predict
from benchmarks.asynchrony.run import Measured, Mode, Training

# 95th percentile of Student's t by degrees of freedom: a two-sided 90 % interval of a mean.
_T = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833}


def modes(k: int) -> dict[str, Mode]:
    """The asynchronous one may be as far ahead as `k` batches too, without waiting for any in particular."""
    return {
        "synchronous": Mode("synchronous", 0, True),
        "step_off": Mode("step_off", k, True),
        "asynchronous": Mode("asynchronous", 4 * k, False),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--k", type=int, default=1)
    parser.add_argument("--train-s", type=float, default=Shape.__dataclass_fields__["train_s"].default)
    parser.add_argument("--median-s", type=float, default=Shape.__dataclass_fields__["median_s"].default)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shape = Shape(train_s=arguments.train_s, median_s=arguments.median_s, sigma=arguments.sigma)
    found: dict[str, list[Measured]] = {}
    for name, mode in modes(arguments.k).items():
        for seed in range(arguments.seeds):
            training = Training(mode, shape, arguments.steps, seed, arguments.learning_rate)
            found.setdefault(name, []).append(asyncio.run(training.run()))
        print(_line(name, found[name], predict(shape, name, arguments.k)), flush=True)
    print(json.dumps(summary(shape, arguments.k, found)))


def _line(name: str, runs: list[Measured], predicted: float) -> str:
    mean = {what: fmean(getattr(run, what) for run in runs) for what in Measured.__dataclass_fields__}
    return (
        f"{name:13} {1000 * mean['step_s']:7.1f} ms/step (planned {1000 * predicted:7.1f})  overlap {mean['overlap']:.2f}  "
        f"idle: slots {mean['idle_slots']:.0%}, trainer {mean['idle_trainer']:.0%}  staleness {mean['staleness']:.1f}  "
        f"reward {mean['reward']:.3f}"
    )


def summary(shape: Shape, k: int, found: dict[str, list[Measured]]) -> dict[str, Any]:
    """Means, deviations from the plan, speed-up with its interval, and the paired difference of the rewards."""
    result: dict[str, Any] = {"shape": asdict(shape), "k": k, "seeds": len(found["synchronous"])}
    for name, runs in found.items():
        mean = {what: fmean(getattr(run, what) for run in runs) for what in Measured.__dataclass_fields__}
        planned = predict(shape, name, k)
        result[name] = {**mean, "planned_step_s": planned, "deviation": mean["step_s"] / planned - 1.0}
    pairs = list(zip(found["synchronous"], found["asynchronous"], strict=True))
    result["speedup"] = interval([sync.step_s / asynchronous.step_s for sync, asynchronous in pairs])
    result["reward_difference"] = interval([asynchronous.reward - sync.reward for sync, asynchronous in pairs])
    return result


def interval(values: list[float]) -> list[float]:
    """[mean, low, high] with a 90 % interval by Student's t."""
    mean = fmean(values)
    if len(values) < 2:
        return [mean, mean, mean]
    half = _T.get(len(values) - 1, 1.7) * stdev(values) / math.sqrt(len(values))
    return [mean, mean - half, mean + half]


if __name__ == "__main__":
    main()
