"""Sums of two small numbers, asked for without examples. Learning it means learning the answer's format, then sums."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from environments.base import check_index, digest_order, epoch_choice, eval_index
from protocol.errors import UserError
from protocol.rollout import Task

_INTEGER = re.compile(r"-?\d+")


@dataclass(frozen=True)
class Arithmetic:
    """Sums A + B, A in 1..`max_a` and B in 1..`max_b`; `held_out` of the pairs are never trained on.

    `template` is the prompt, with {a} and {b} where the numbers go.

    Which pairs are held out depends on the ranges alone, so that runs with different seeds are evaluated alike.
    """

    name: ClassVar[str] = "arithmetic"

    seed: int = 0
    max_a: int = 29
    max_b: int = 19
    held_out: int = 200
    template: str = "Question: What is {a} + {b}?\nAnswer:"

    def __post_init__(self) -> None:
        if self.max_a < 1 or self.max_b < 1:
            raise UserError(f"arithmetic: max_a and max_b must be at least 1, got {self.max_a} and {self.max_b}")
        if not 0 < self.held_out < self.max_a * self.max_b:
            raise UserError(
                f"arithmetic: held_out must leave some of the {self.max_a * self.max_b} pairs to train on and be "
                f"at least 1, got {self.held_out}"
            )

        if "{a}" not in self.template or "{b}" not in self.template:
            raise UserError(f"arithmetic: template must hold {{a}} and {{b}}, got {self.template!r}")

    @cached_property
    def _pairs(self) -> list[tuple[int, int]]:
        pairs = [(a, b) for a in range(1, self.max_a + 1) for b in range(1, self.max_b + 1)]
        return sorted(pairs, key=lambda pair: digest_order(f"{pair[0]}+{pair[1]}"))

    @property
    def eval_size(self) -> int:
        return self.held_out

    @property
    def train_size(self) -> int:
        """How many different sums are trained on."""
        return len(self._pairs) - self.held_out

    def task(self, index: int) -> Task:
        choice = epoch_choice(self.seed, check_index(index), self.train_size)
        return self._task(index, *self._pairs[self.held_out + choice])

    def eval_task(self, index: int) -> Task:
        return self._task(eval_index(check_index(index, self.held_out)), *self._pairs[index])

    def score(self, task: Task, completion: str) -> float:
        return float(completion.strip() == task.reference)

    def well_formed(self, completion: str) -> bool:
        return _INTEGER.fullmatch(completion.strip()) is not None

    def _task(self, index: int, a: int, b: int) -> Task:
        return Task(self.name, index, self.template.replace("{a}", str(a)).replace("{b}", str(b)), str(a + b))
