"""Counting on from a number: answers of 48 to 64 tokens, for what short answers never show (whole proof chunks, spans)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from environments.base import check_index, digest_order, epoch_choice, eval_index
from protocol.errors import UserError
from protocol.rollout import Task

_LIST = re.compile(r"\d+(, ?\d+)*,?")


@dataclass(frozen=True)
class Counting:
    """`Count from S: S, S+1,` to be continued; right if the next `terms` numbers are.

    An answer usually ends at the length limit, in the middle of a number: what follows the first `terms` numbers does
    not count. The starts are 1..`max_start`, of which `held_out` are never trained on.
    """

    name: ClassVar[str] = "counting"

    seed: int = 0
    max_start: int = 80
    held_out: int = 16
    terms: int = 12

    def __post_init__(self) -> None:
        if not 0 < self.held_out < self.max_start:
            raise UserError(f"counting: held_out must be in 1..{self.max_start - 1}, got {self.held_out}")
        if self.terms < 1:
            raise UserError(f"counting: terms must be at least 1, got {self.terms}")

    @cached_property
    def _starts(self) -> list[int]:
        return sorted(range(1, self.max_start + 1), key=lambda start: digest_order(f"count {start}"))

    @property
    def eval_size(self) -> int:
        return self.held_out

    def task(self, index: int) -> Task:
        choice = epoch_choice(self.seed, check_index(index), self.max_start - self.held_out)
        return self._task(index, self._starts[self.held_out + choice])

    def eval_task(self, index: int) -> Task:
        return self._task(eval_index(check_index(index, self.held_out)), self._starts[index])

    def score(self, task: Task, completion: str) -> float:
        numbers = re.sub(r",\s*", ", ", completion.strip())
        right = re.match(re.escape(str(task.reference)) + r"(?!\d)", numbers)
        return float(right is not None)

    def well_formed(self, completion: str) -> bool:
        return _LIST.fullmatch(completion.strip()) is not None

    def _task(self, index: int, start: int) -> Task:
        reference = ", ".join(str(start + 2 + i) for i in range(self.terms))
        return Task(self.name, index, f"Count from {start}: {start}, {start + 1},", reference)
