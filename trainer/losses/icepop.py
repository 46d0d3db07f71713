"""IcePop: tokens on which the engines disagree too much, either way, are left out.

    mismatch:  −sg(w · 1[α ≤ w ≤ β]) · min(r A, clip(r) A)
    whole:     −ρ · 1[α ≤ ρ ≤ β] · A, gradient through ρ

`mismatch` looks at the engines alone, as published; w is 1 unless the run lets workers' log-probs in. `whole` puts the
policy's movement under the same bounds, as INTELLECT-3 does. Sources: IcePop (Ling team 2025); INTELLECT-3; (0.5, 5).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from protocol.errors import UserError
from trainer.losses.base import TokenLoss, one_of
from trainer.losses.inputs import LossInputs, ratio
from trainer.losses.ppo import Ppo, clipped


@dataclass(frozen=True)
class IcePop(Ppo):
    """`low`, `high`: α and β. `variant`: `mismatch` or `whole`. `against`, unless given: as published, `old` for `mismatch`
    and `behaviour` for `whole`."""

    against: str = ""
    low: float = 0.5
    high: float = 5.0
    variant: str = "mismatch"

    def __post_init__(self) -> None:
        one_of("icepop", "variant", self.variant, ("mismatch", "whole"))
        if not self.against:
            object.__setattr__(self, "against", "behaviour" if self.variant == "whole" else "old")
        super().__post_init__()
        if not 0.0 <= self.low < 1.0 < self.high:
            raise UserError(f"icepop: low and high must enclose 1, got {self.low} and {self.high}")

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        if self.variant == "whole":
            whole_BT = self.ratio(inputs)
            inside_BT = self._inside(whole_BT.detach())
            return TokenLoss(torch.where(inside_BT, -whole_BT * inputs.advantage_BT, 0.0), inside_BT, {})
        weight_BT = ratio(self.reference(inputs), inputs.behaviour_BT).detach()
        inside_BT = self._inside(weight_BT)
        loss_BT, kept_BT = clipped(self.ratio(inputs), inputs.advantage_BT, self.clip_low, self.clip_high)
        return TokenLoss(torch.where(inside_BT, weight_BT * loss_BT, 0.0), kept_BT & inside_BT, {})

    def _inside(self, ratio_BT: torch.Tensor) -> torch.Tensor:
        return (ratio_BT >= self.low) & (ratio_BT <= self.high)
