"""Plain policy gradient with importance sampling: −ρ A. Unbiased, of unbounded variance: the baseline that fails first.

Source: REINFORCE (Williams 1992) with importance weights per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.losses.against import RatioLoss
from trainer.losses.base import TokenLoss
from trainer.losses.inputs import LossInputs


@dataclass(frozen=True)
class PgIs(RatioLoss):
    """No trust region at all."""

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        loss_BT = -self.ratio(inputs) * inputs.advantage_BT
        return TokenLoss(loss_BT, torch.ones_like(inputs.mask_BT), {})
