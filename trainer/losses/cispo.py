"""CISPO: the importance weight is clipped, the token never: all tokens keep a gradient.

    −sg(clip(ρ, 1 − ε_low, 1 + ε_high)) · A · new

Source: MiniMax-M1 (2025). It sets no lower bound and leaves the upper one to tuning; ε_low = 1 is no lower bound, and
1 + ε_high = 5 is our choice, among the 4 to 8 that others reported to work.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import UserError
from trainer.losses.against import RatioLoss
from trainer.losses.base import TokenLoss, surrogate, within
from trainer.losses.inputs import LossInputs, masked_mean


@dataclass(frozen=True)
class Cispo(RatioLoss):
    """`clip_low`, `clip_high`: the weight's bounds are 1 − clip_low and 1 + clip_high."""

    clip_low: float = 1.0
    clip_high: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        within("cispo", "clip_low", self.clip_low, 0.0, 1.0)
        if self.clip_high < 0.0:
            raise UserError(f"cispo: clip_high must be at least 0, got {self.clip_high}")

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        ratio_BT = self.ratio(inputs).detach()
        weight_BT = ratio_BT.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        metrics = {"weight_clipped": masked_mean(weight_BT != ratio_BT, inputs.mask_BT)}
        return TokenLoss(surrogate(weight_BT, inputs), inputs.mask_BT, metrics)
