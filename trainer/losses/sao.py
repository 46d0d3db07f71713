"""SAO: single rollouts, a critic's baseline, and a hard window on the importance weight.

    −sg(f(ρ)) · A · new,   f(ρ) = ρ inside (1 − 0.3, 1 + 5), else 0

One rollout per task has no group to compare with: use `advantage = "critic"` (GAE, λ = 1 − 1/(1.5 L), two value updates
per policy step) or `"single"` (a moving average). Source: SAO (2026); its code has 0.8 and 3 for 0.3 and 5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.losses.against import RatioLoss
from trainer.losses.base import TokenLoss, surrogate, within
from trainer.losses.inputs import LossInputs


@dataclass(frozen=True)
class Sao(RatioLoss):
    """`low`, `high`: the window is (1 − low, 1 + high)."""

    low: float = 0.3
    high: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        within("sao", "low", self.low, 0.0, 1.0, open_low=True)
        within("sao", "high", self.high, 0.0, float("inf"), open_low=True)

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        ratio_BT = self.ratio(inputs).detach()
        inside_BT = (ratio_BT > 1.0 - self.low) & (ratio_BT < 1.0 + self.high)
        return TokenLoss(torch.where(inside_BT, surrogate(ratio_BT, inputs), 0.0), inside_BT, {})
