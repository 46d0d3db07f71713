"""`python -m benchmarks.asynchrony`: synchronous, step-off-k and asynchronous, against the planner. Ends with a line of JSON.

Times are measured with engines and a trainer that sleep, so that no mode is short of cores. Rewards come from the same
schedules on a virtual clock with a policy that really learns, so that they are the same on any machine. With
`--engine vllm` a network of real processes trains instead, strictly synchronous and asynchronous (see `real`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.asynchrony.planner import Shape
from benchmarks.asynchrony.pupils import Learner, Sleeper
from benchmarks.asynchrony.report import learnt, line, of_mode, times
from benchmarks.asynchrony.run import Measured, Mode, Training
from benchmarks.asynchrony.virtual import run_virtually


def modes(k: int) -> dict[str, Mode]:
    """The asynchronous one may be as far ahead as `4k` batches too, without waiting for any in particular."""
    return {
        "synchronous": Mode("synchronous", 0, True),
        "step_off": Mode("step_off", k, True),
        "asynchronous": Mode("asynchronous", 4 * k, False),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("sleeping", "vllm", "reference"), default="sleeping")
    parser.add_argument("--seeds", type=int, default=5, help="of the timed runs")
    parser.add_argument("--reward-seeds", type=int, default=20)
    parser.add_argument("--part", choices=("times", "rewards", "both"), default="both")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--k", type=int, default=1)
    parser.add_argument("--train-s", type=float, default=Shape.__dataclass_fields__["train_s"].default)
    parser.add_argument("--median-s", type=float, default=Shape.__dataclass_fields__["median_s"].default)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--versions", type=int, default=8, help="of a real network's run")
    parser.add_argument(
        "--cache", type=Path, default=Path(".cache/models"), help="where the real network's model is kept"
    )
    arguments = parser.parse_args()
    if arguments.engine == "sleeping":
        _sleeping(arguments)
        return
    from benchmarks.asynchrony.real import compare

    print(json.dumps(compare(arguments.engine, arguments.versions, arguments.cache.resolve())))


def _sleeping(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    shape = Shape(train_s=arguments.train_s, median_s=arguments.median_s, sigma=arguments.sigma)
    found: dict[str, Any] = {"steps": arguments.steps, "learning_rate": arguments.learning_rate}
    if arguments.part != "rewards":
        found |= _times(arguments, shape)
        print("speed-up {:.2f} [{:.2f}, {:.2f}] (90 %)".format(*found["speedup"]), flush=True)
    if arguments.part != "times":
        found |= _rewards(arguments, shape)
        print("reward difference {:+.3f} [{:+.3f}, {:+.3f}] (90 %)".format(*found["reward_difference"]))
    print(json.dumps(found))


def _times(arguments: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    timed: dict[str, list[Measured]] = {}
    for name, mode in modes(arguments.k).items():
        timed[name] = [
            asyncio.run(Training(mode, shape, arguments.steps, seed, Sleeper()).run())
            for seed in range(arguments.seeds)
        ]
        print(line(name, of_mode(shape, name, arguments.k, timed[name])), flush=True)
    return times(shape, arguments.k, timed)


def _rewards(arguments: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    rewards: dict[str, list[float]] = {}
    for seed in range(arguments.reward_seeds):
        for name, mode in modes(arguments.k).items():
            reward = final_reward(mode, shape, arguments.steps, seed, arguments.learning_rate)
            rewards.setdefault(name, []).append(reward)
        print(f"seed {seed}: " + ", ".join(f"{name} {each[-1]:.3f}" for name, each in rewards.items()), flush=True)
    return learnt(rewards)


def final_reward(mode: Mode, shape: Shape, steps: int, seed: int, learning_rate: float) -> float:
    """Held-out reward after so many steps on that schedule; the same for the same arguments."""
    learner = Learner(seed, learning_rate)
    run_virtually(Training(mode, shape, steps, seed, learner).run())
    return learner.reward()


if __name__ == "__main__":
    main()
