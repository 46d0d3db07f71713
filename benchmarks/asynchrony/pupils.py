"""What is scheduled: a policy that really learns, or nothing at all where only the schedule's time is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from statistics import fmean
from typing import Any, Protocol

import torch

from benchmarks.staleness.lab import Batch, Setting, held_out_reward, sample, update
from benchmarks.staleness.policy import Policy
from benchmarks.staleness.task import tasks
from trainer.losses import make_objective

_ONE = Setting(groups=1)
_EVALUATIONS = 5


class Pupil(Protocol):
    """Generates groups and learns from them."""

    def generate(self, version: int) -> Any:
        """A group by the policy as it is."""

    def learn(self, groups: Sequence[Any], step: int) -> None:
        """One step on a batch."""


class Sleeper:
    """Computes nothing: what is measured then is waiting alone, and no mode is short of cores."""

    def generate(self, version: int) -> None:
        return None

    def learn(self, groups: Sequence[None], step: int) -> None:
        return None


class Learner:
    """The tiny policy of the staleness laboratory under the default objective."""

    def __init__(self, seed: int, learning_rate: float) -> None:
        self._seed = seed
        self._policy = Policy(seed)
        self._optimizer = torch.optim.AdamW(self._policy.parameters(), lr=learning_rate, betas=(0.9, 0.95))
        self._generator = torch.Generator().manual_seed(seed)
        self._train, self._held_out = tasks()
        self._objective = make_objective("ipo")

    def generate(self, version: int) -> Batch:
        return sample(self._policy, self._train, _ONE, self._generator, version)

    def learn(self, groups: Sequence[Batch], step: int) -> None:
        update(self._policy, self._optimizer, self._objective, _joined(groups), step)

    def reward(self) -> float:
        """Mean reward on held-out tasks."""
        seeds = (self._seed + each for each in range(_EVALUATIONS))
        return fmean(held_out_reward(self._policy, self._held_out, seed) for seed in seeds)


def _joined(parts: Sequence[Batch]) -> Batch:
    """Groups as one batch; its version is the oldest's (each token's own old log-probs are kept)."""
    joined = {
        part.name: torch.cat([getattr(each, part.name) for each in parts])
        for part in fields(Batch)
        if part.name != "version"
    }
    return Batch(**joined, version=min(each.version for each in parts))
