"""INTELLECT-2's two-sided clip: PPO, and a bound δ for negative advantages too.

    −min(min(ρ, δ) A, clip(ρ, 1 − ε, 1 + ε) A)

Without δ a negative advantage times a huge ratio makes an unbounded loss, since PPO's minimum takes the unclipped side
there. Where ρ > δ the gradient is 0. Source: INTELLECT-2 (2025), δ = 4, ε = 0.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from protocol.errors import UserError
from trainer.losses.base import TokenLoss
from trainer.losses.inputs import LossInputs, masked_mean
from trainer.losses.ppo import Ppo, clipped


def truncated_ppo(ratio_BT: torch.Tensor, inputs: LossInputs, ceiling: float, low: float, high: float) -> TokenLoss:
    """PPO on min(ρ, ceiling); `ratio_truncated` among the metrics is the share of tokens beyond it."""
    beyond_BT = ratio_BT.detach() > ceiling
    loss_BT, inside_BT = clipped(ratio_BT.clamp(max=ceiling), inputs.advantage_BT, low, high)
    return TokenLoss(loss_BT, inside_BT & ~beyond_BT, {"ratio_truncated": masked_mean(beyond_BT, inputs.mask_BT)})


@dataclass(frozen=True)
class TwoSided(Ppo):
    """`delta`: the largest ratio that counts."""

    clip_high: float = 0.2
    delta: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delta <= 1.0 + self.clip_high:
            raise UserError(f"two_sided: delta must be above 1 + clip_high = {1 + self.clip_high}, got {self.delta}")

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        return truncated_ppo(self.ratio(inputs), inputs, self.delta, self.clip_low, self.clip_high)
