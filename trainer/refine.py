"""Advantages that need the policy: a critic's, and the baseline of least variance. They replace those of the rewards alone.

Both are computed once per step, before its first update, from log-probs or hidden states of the step-start policy.
Completions are named by their keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from protocol.rollout import StopReason
from trainer.advantage import Chosen
from trainer.batching import Microbatch
from trainer.losses.inputs import log_ratio
from trainer.losses.vcpo import minimal_variance_baseline
from trainer.returns import gae, length_lambda


@dataclass(frozen=True, slots=True)
class Movement:
    """How a completion stands: `log_weight` = Σ (prox − behaviour) in nats, `squared_norm` ≈ Σ (1 − p)²."""

    log_weight: float
    squared_norm: float


def movements(batch: Microbatch, prox_BT: torch.Tensor, behaviour_BT: torch.Tensor) -> dict[int, Movement]:
    """By key, over the trained tokens."""
    zero = torch.zeros((), device=prox_BT.device)
    weight_B = torch.where(batch.mask_BT, log_ratio(prox_BT, behaviour_BT), zero).double().sum(dim=1)
    norm_B = torch.where(batch.mask_BT, (1.0 - prox_BT.exp()).square(), zero).double().sum(dim=1)
    rows = zip(batch.key_B.tolist(), weight_B.tolist(), norm_B.tolist(), strict=True)
    return {key: Movement(weight, norm) for key, weight, norm in rows}


def minimal_variance_advantages(
    chosen: Sequence[tuple[int, Chosen]], moved: Mapping[int, Movement]
) -> dict[int, float]:
    """R − b by key, b over each group's trained completions. `chosen`: groups with the key of their first completion."""
    advantages: dict[int, float] = {}
    for first, group in chosen:
        keys = [first + place for place in range(len(group.rewards)) if first + place in moved]
        if not keys:
            continue
        rewards = [group.rewards[key - first] for key in keys]
        parts = [moved[key] for key in keys]
        baseline = minimal_variance_baseline(
            rewards, [part.log_weight for part in parts], [part.squared_norm for part in parts]
        )
        advantages |= {key: reward - baseline for key, reward in zip(keys, rewards, strict=True)}
    return advantages


def critic_advantages(
    chosen: Sequence[tuple[int, Chosen]], values: Mapping[int, Sequence[float]], lam: float
) -> dict[int, list[float]]:
    """GAE per trained token, by key. `lam` 0: λ by the completion's length. A completion cut off is bootstrapped."""
    advantages: dict[int, list[float]] = {}
    for first, group in chosen:
        for place, item in enumerate(group.group.rollouts):
            own = values.get(first + place)
            if own is None:
                continue
            ended = item.rollout.stop_reason == StopReason.EOS
            chosen_lam = lam or length_lambda(len(own))
            advantages[first + place] = gae(group.rewards[place], own, chosen_lam, ended)
    return advantages


def with_advantages(batch: Microbatch, advantages: Mapping[int, float | Sequence[float]]) -> Microbatch:
    """The batch with other advantages: one per completion, or one per trained token."""
    return replace(batch, advantage_BT=spread(batch, advantages))


def spread(batch: Microbatch, values: Mapping[int, float | Sequence[float]]) -> torch.Tensor:
    """[B, T] values by key, one per completion or one per trained token; 0 outside the mask. The inverse of `by_key`."""
    spread_BT = torch.zeros_like(batch.advantage_BT)
    for b, key in enumerate(batch.key_B.tolist()):
        spread_BT[b, batch.mask_BT[b]] = torch.as_tensor(values[key], dtype=spread_BT.dtype, device=spread_BT.device)
    return spread_BT


def by_key(batch: Microbatch, values_BT: torch.Tensor) -> dict[int, list[float]]:
    """Values of the trained tokens, in order."""
    rows = zip(batch.key_B.tolist(), values_BT.cpu(), batch.mask_BT.cpu(), strict=True)
    return {key: values[mask].tolist() for key, values, mask in rows}
