"""Advantages of a group of completions of one task, from their raw rewards. Lists in, lists out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from protocol.errors import UserError
from protocol.rollout import RolloutGroup, VerifiedRollout
from trainer.filters import NO_FILTERS, Filters


def grpo(rewards: Sequence[float]) -> list[float]:
    """(R − mean) / (std + 1e-6), the standard deviation of the population. Source: DeepSeekMath (2024)."""
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(reward - mean) / (deviation + 1e-6) for reward in rewards]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """R − mean: no division, which would overweigh tasks that are almost always or never solved. Source: Dr. GRPO."""
    mean = statistics.fmean(rewards)
    return [reward - mean for reward in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """R − mean of the others: unbiased at any size n ≥ 2, so also for incomplete groups. 0 for a group of one.

    Source: Ahmadian et al. 2024 ("Back to Basics").
    """
    if len(rewards) < 2:
        return [0.0 for _ in rewards]
    total = sum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


def maxrl(rewards: Sequence[float]) -> list[float]:
    """(R − mean) / mean, 0 if nothing was solved: ascends the log of the success rate. Source: MaxRL (2026)."""
    mean = statistics.fmean(rewards)
    return [(reward - mean) / mean if mean > 0.0 else 0.0 for reward in rewards]


ADVANTAGES: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "dr_grpo": dr_grpo,
    "grpo": grpo,
    "maxrl": maxrl,
    "rloo": rloo,
}
# Those that need no group: a moving average of the rewards (`trainer.baseline`), a critic (`trainer.critic`).
ALONE = ("single", "critic")


def check_advantage(name: str) -> None:
    """Raises UserError that names the choices if there is no advantage `name`."""
    if name not in ADVANTAGES and name not in ALONE:
        raise UserError(f"there is no advantage {name!r}; choose {', '.join(sorted([*ADVANTAGES, *ALONE]))}")


class Advantage(Protocol):
    """How a group's rewards become advantages. `alone`: a group of one has an advantage too."""

    @property
    def alone(self) -> bool: ...

    def __call__(self, environment: str, rewards: Sequence[float], complete: bool) -> list[float]: ...


@dataclass(frozen=True, slots=True)
class GroupAdvantage:
    """One of ADVANTAGES. An incomplete group takes RLOO, whose baseline is right at any size."""

    name: str

    @property
    def alone(self) -> bool:
        return False

    def __call__(self, environment: str, rewards: Sequence[float], complete: bool) -> list[float]:
        return ADVANTAGES[self.name](rewards) if complete else rloo(rewards)


@dataclass(frozen=True, slots=True)
class RawReward:
    """The reward itself, for a critic's baseline to be taken from later."""

    @property
    def alone(self) -> bool:
        return True

    def __call__(self, environment: str, rewards: Sequence[float], complete: bool) -> list[float]:
        return list(rewards)


@dataclass(frozen=True, slots=True)
class LengthBudget:
    """R − α |target − L|: completions of about `target` tokens are worth the most; 0 is no budget.

    Source: INTELLECT-2 (2025), α = 3e-4 (it draws a target per task and tells it in the prompt; here it is one for all).
    """

    target: int = 0
    alpha: float = 3e-4

    def __call__(self, item: VerifiedRollout) -> float:
        if not self.target:
            return item.reward
        return item.reward - self.alpha * abs(self.target - item.rollout.model_tokens)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A group to train on: shaped rewards, and an advantage for each rollout, None for one that is not trained on."""

    group: RolloutGroup
    rewards: tuple[float, ...]
    advantages: tuple[float | None, ...]

    @property
    def trained(self) -> tuple[VerifiedRollout, ...]:
        """The rollouts that take part."""
        pairs = zip(self.group.rollouts, self.advantages, strict=True)
        return tuple(item for item, advantage in pairs if advantage is not None)


@dataclass(frozen=True, slots=True)
class Selection:
    """Groups to train on with their advantages; `dropped`: the other rollouts, by reason."""

    groups: tuple[Chosen, ...]
    dropped: dict[str, tuple[VerifiedRollout, ...]]
    incomplete_groups: int


def select(
    groups: Sequence[RolloutGroup],
    advantage: Advantage,
    filters: Filters = NO_FILTERS,
    budget: LengthBudget | None = None,
) -> Selection:
    """Compute advantages per group and drop what teaches nothing, by the reasons of `trainer.filters`.

    Groups are judged by their rewards as verified, advantages are of shaped ones: a group whose rewards are equal has only
    its lengths to teach, and is dropped.
    """
    kept: list[Chosen] = []
    dropped: dict[str, tuple[VerifiedRollout, ...]] = {}
    incomplete = 0
    for group in groups:
        reason = filters.group_reason([item.reward for item in group.rollouts], alone=advantage.alone)
        if reason:
            dropped[reason] = dropped.get(reason, ()) + group.rollouts
            continue
        complete = len(group.rollouts) >= group.n_requested
        incomplete += not complete
        rewards = tuple(budget(item) if budget else item.reward for item in group.rollouts)
        advantages: list[float | None] = list(advantage(group.environment, rewards, complete))
        for place, item in enumerate(group.rollouts):
            reason = filters.rollout_reason(item)
            if reason:
                advantages[place] = None
                dropped[reason] = (*dropped.get(reason, ()), item)
        if any(value is not None for value in advantages):
            kept.append(Chosen(group, rewards, tuple(advantages)))
    return Selection(tuple(kept), dropped, incomplete)
