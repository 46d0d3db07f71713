"""PPO's clipped objective: −min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A).

Sources: PPO (Schulman et al. 2017); the higher upper bound ("clip higher") from DAPO (2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from protocol.errors import UserError
from trainer.losses.against import RatioLoss
from trainer.losses.base import TokenLoss
from trainer.losses.inputs import LossInputs


def clipped(
    ratio_BT: torch.Tensor, advantage_BT: torch.Tensor, low: float | torch.Tensor, high: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's loss per token, and where it has a gradient. `ratio_BT` ≥ 0 may have been truncated before.

    `low`, `high` ≥ 0: bounds 1 − low and 1 + high, the same for all tokens or [B, T].
    """
    floor, ceiling = torch.as_tensor(1.0 - low).to(ratio_BT), torch.as_tensor(1.0 + high).to(ratio_BT)
    bounded_BT = torch.minimum(torch.maximum(ratio_BT, floor), ceiling)
    loss_BT = -torch.minimum(ratio_BT * advantage_BT, bounded_BT * advantage_BT)
    outside_BT = torch.where(advantage_BT > 0, ratio_BT > ceiling, ratio_BT < floor)
    return torch.where(outside_BT, loss_BT.detach(), loss_BT), ~outside_BT


@dataclass(frozen=True)
class Ppo(RatioLoss):
    """`clip_low`, `clip_high`: how far the ratio may leave 1 on either side."""

    clip_low: float = 0.2
    clip_high: float = 0.28

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = type(self).__name__.lower()
        if not 0.0 < self.clip_low < 1.0:
            raise UserError(f"{owner}: clip_low must be in (0, 1), got {self.clip_low}")
        if self.clip_high <= 0.0:
            raise UserError(f"{owner}: clip_high must be above 0, got {self.clip_high}")

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        return TokenLoss(*clipped(self.ratio(inputs), inputs.advantage_BT, self.clip_low, self.clip_high), {})
