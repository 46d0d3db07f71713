"""GSPO: one ratio for the whole completion, the geometric mean of its tokens' ratios, clipped very tightly.

    s_i = exp(mean_t(new − old)),   −min(s_i A, clip(s_i, 1 − 3e-4, 1 + 4e-4) A),   mean over completions

The reward belongs to the completion, so the ratio does too. Source: Group Sequence Policy Optimization (Qwen, 2025).
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.losses.base import Aggregation, TokenLoss
from trainer.losses.inputs import LossInputs
from trainer.losses.ppo import Ppo, clipped


@dataclass(frozen=True)
class Gspo(Ppo):
    """As Ppo, of the completion's ratio."""

    aggregation: str = Aggregation.SEQUENCE
    against: str = "old"
    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        # Cleaned inputs have a ratio of 0 nats outside the mask.
        total_B1 = self.log_ratio(inputs).sum(dim=1, keepdim=True)
        mean_B1 = total_B1 / inputs.mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        ratio_BT = mean_B1.exp().expand_as(inputs.new_BT)
        return TokenLoss(*clipped(ratio_BT, inputs.advantage_BT, self.clip_low, self.clip_high), {})
