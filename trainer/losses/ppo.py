"""PPO's clipped objective: −min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A).

Sources: PPO (Schulman et al. 2017); the higher upper bound ("clip higher") from DAPO (2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from protocol.errors import UserError
from trainer.losses.base import Loss, LossInputs, TokenLoss, ratio


def clipped(
    ratio_BT: torch.Tensor, advantage_BT: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's loss per token, and where it has a gradient. `ratio_BT` ≥ 0 may have been truncated before."""
    bounded_BT = ratio_BT.clamp(1.0 - low, 1.0 + high)
    loss_BT = -torch.minimum(ratio_BT * advantage_BT, bounded_BT * advantage_BT)
    outside_BT = torch.where(advantage_BT > 0, ratio_BT > 1.0 + high, ratio_BT < 1.0 - low)
    return loss_BT, ~outside_BT


@dataclass(frozen=True)
class Ppo(Loss):
    """`clip_low`, `clip_high`: how far the ratio may leave 1 on either side."""

    clip_low: float = 0.2
    clip_high: float = 0.28

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.clip_low < 1.0:
            raise UserError(f"ppo: clip_low must be in (0, 1), got {self.clip_low}")
        if self.clip_high <= 0.0:
            raise UserError(f"ppo: clip_high must be above 0, got {self.clip_high}")

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        ratio_BT = ratio(inputs.new_BT, inputs.behaviour_BT)
        return TokenLoss(*clipped(ratio_BT, inputs.advantage_BT, self.clip_low, self.clip_high), {})
