"""Plain policy gradient with importance sampling: −ρ A. Unbiased, of unbounded variance: the baseline that fails first.

Source: REINFORCE (Williams 1992) with importance weights per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.losses.base import Loss, LossInputs, TokenLoss, ratio


@dataclass(frozen=True)
class PgIs(Loss):
    """No trust region at all."""

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        loss_BT = -ratio(inputs.new_BT, inputs.behaviour_BT) * inputs.advantage_BT
        return TokenLoss(loss_BT, torch.ones_like(inputs.mask_BT, dtype=torch.bool), {})
