"""Advantages of a group of completions of one task, from their raw rewards. Lists in, lists out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protocol.errors import UserError
from protocol.rollout import RolloutGroup

_EQUAL = 1e-9


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


def make_advantage(name: str) -> Callable[[Sequence[float]], list[float]]:
    """The advantage `name`. Raises UserError that names the choices."""
    if name not in ADVANTAGES:
        raise UserError(f"there is no advantage {name!r}; choose {', '.join(sorted(ADVANTAGES))}")
    return ADVANTAGES[name]


@dataclass(frozen=True, slots=True)
class Selection:
    """Groups to train on with their advantages; `dropped`: the rollout ids of the others, by reason."""

    groups: tuple[tuple[RolloutGroup, tuple[float, ...]], ...]
    dropped: dict[str, tuple[str, ...]]
    incomplete_groups: int


def select(
    groups: Sequence[RolloutGroup], advantage: Callable[[Sequence[float]], list[float]], *, keep_zero: bool = False
) -> Selection:
    """Compute advantages per group and drop what teaches nothing.

    A group whose rewards are all equal has no advantage (reason `zero_advantage`), unless `keep_zero`; one with a single
    rollout has nothing to be compared with (reason `too_small`). An incomplete group of n ≥ 2 takes RLOO, whose baseline
    is right at any size, and is counted.
    """
    kept: list[tuple[RolloutGroup, tuple[float, ...]]] = []
    dropped: dict[str, tuple[str, ...]] = {}
    incomplete = 0
    for group in groups:
        rewards = [item.reward for item in group.rollouts]
        reason = _reason_to_drop(rewards, keep_zero)
        if reason:
            dropped[reason] = dropped.get(reason, ()) + tuple(item.rollout_id for item in group.rollouts)
            continue
        complete = len(rewards) >= group.n_requested
        incomplete += not complete
        kept.append((group, tuple(advantage(rewards) if complete else rloo(rewards))))
    return Selection(tuple(kept), dropped, incomplete)


def _reason_to_drop(rewards: Sequence[float], keep_zero: bool) -> str:
    if len(rewards) < 2:
        return "too_small"
    if not keep_zero and max(rewards) - min(rewards) < _EQUAL:
        return "zero_advantage"
    return ""
