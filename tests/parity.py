"""An environment that a random model can win at: is the number of tokens' bytes even? For tests of the machinery."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from protocol.rollout import Task


@dataclass(frozen=True)
class Parity:
    """Scores 1.0 if the completion has an even number of characters."""

    name: ClassVar[str] = "parity"
    eval_size: int = 16

    def task(self, index: int) -> Task:
        return Task(self.name, index, f"Task number {index}: ")

    def eval_task(self, index: int) -> Task:
        return Task(self.name, -1 - index, f"Held-out task number {index}: ")

    def score(self, task: Task, completion: str) -> float:
        return float(len(completion) % 2 == 0)

    def well_formed(self, completion: str) -> bool:
        return True
