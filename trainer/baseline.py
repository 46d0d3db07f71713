"""`single`: the advantage of one rollout against a moving average of its environment's rewards.

    A = R − b,   then b ← b + (1 − decay)(mean R of the group − b);   the first group of an environment begins it

Groups of an environment are seen in the order of the batch, each against the average before it, so that no rollout is in
its own baseline. The averages are state of the run and belong to its checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class MovingBaseline:
    """`decay` in [0, 1): share of the average that stays. `averages`: by environment."""

    decay: float = 0.95
    averages: dict[str, float] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        return True

    def __call__(self, environment: str, rewards: Sequence[float], complete: bool) -> list[float]:
        mean = sum(rewards) / len(rewards)
        # An environment's first group has nothing before it: a group of one then teaches nothing.
        before = self.averages.get(environment, mean)
        self.averages[environment] = before + (1.0 - self.decay) * (mean - before)
        return [reward - before for reward in rewards]
