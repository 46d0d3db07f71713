"""V-trace's policy gradient, the ancestor: the importance weight is truncated at 1 from above.

    −sg(min(ρ, ρ̄)) · A · new

Never more than on-policy data would count, so the policy that it climbs towards lies between the two. IMPALA takes its
advantages from V-trace targets; here they are the run's, with a critic by GAE, whose targets are not corrected for the
data's age. Source: IMPALA (Espeholt et al. 2018), ρ̄ = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.losses.against import RatioLoss
from trainer.losses.base import TokenLoss, surrogate, within
from trainer.losses.inputs import LossInputs


@dataclass(frozen=True)
class Vtrace(RatioLoss):
    """`cap`: ρ̄."""

    cap: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        within("vtrace", "cap", self.cap, 0.0, float("inf"), open_low=True)

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        weight_BT = self.ratio(inputs).clamp(max=self.cap)
        return TokenLoss(surrogate(weight_BT, inputs), torch.ones_like(inputs.mask_BT), {})
