"""VCPO (wraps any loss): the learning rate shrinks with the effective sample size, and baselines minimize variance.

    lr × √min(1, ESS / B),   ESS = (Σ w_i)² / Σ w_i²,   w_i = exp(Σ_t(new − behaviour)) of completion i
    b = Σ w² ‖g‖² R / Σ w² ‖g‖² over a group, instead of its mean reward

‖g‖, the norm of a completion's own gradient, would take a backward pass per completion. It is approximated by the norm of
the gradient in the logits of the tokens taken, √Σ_t(1 − p_t)²: what the rest of the network multiplies to it is taken
to be the same for all completions of a group. Weights are taken relative to the largest, so any lengths are safe.
Source: VCPO ("Stable Asynchrony", arXiv 2602.17616).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.losses.base import Modifier


@dataclass(frozen=True)
class Vcpo(Modifier):
    """`scale_rate`: shrink the learning rate. `baseline`: replace the group's baseline."""

    scale_rate: bool = True
    baseline: bool = False

    def rate_scale(self, log_weights: Sequence[float]) -> float:
        if not self.scale_rate or not log_weights:
            return 1.0
        return math.sqrt(min(1.0, effective_size(log_weights) / len(log_weights)))


def effective_size(log_weights: Sequence[float]) -> float:
    """(Σ w)² / Σ w² of weights given as logarithms; in [1, number of weights]."""
    weights = _relative(log_weights)
    return sum(weights) ** 2 / sum(weight * weight for weight in weights)


def minimal_variance_baseline(
    rewards: Sequence[float], log_weights: Sequence[float], squared_norms: Sequence[float]
) -> float:
    """Σ w² ‖g‖² R / Σ w² ‖g‖²; the mean reward where no completion has a gradient."""
    scales = [weight * weight * norm for weight, norm in zip(_relative(log_weights), squared_norms, strict=True)]
    total = sum(scales)
    if total <= 0.0:
        return sum(rewards) / len(rewards)
    return sum(scale * reward for scale, reward in zip(scales, rewards, strict=True)) / total


def _relative(log_weights: Sequence[float]) -> list[float]:
    largest = max(log_weights)
    return [math.exp(max(value - largest, -300.0)) for value in log_weights]
