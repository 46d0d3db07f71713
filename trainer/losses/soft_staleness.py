"""Soft staleness (wraps any loss): a token of staleness s weighs γ^s, in numerator and denominator alike.

A batch in which all tokens have one s is therefore the same as without weights. Tokens beyond the ceiling take no part.
Source: the asynchronous chapter of the RLHF book, γ = 0.8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from protocol.errors import UserError
from trainer.losses.base import Modifier, within


@dataclass(frozen=True)
class SoftStaleness(Modifier):
    """`gamma`: γ, per version. `ceiling`: largest s, in versions, that takes part; −1 is none."""

    gamma: float = 0.8
    ceiling: int = -1

    def __post_init__(self) -> None:
        within("soft_staleness", "gamma", self.gamma, 0.0, 1.0, open_low=True)
        if self.ceiling < -1:
            raise UserError(f"soft_staleness: ceiling must be at least 0, or -1 for none, got {self.ceiling}")

    def weight(self, staleness_BT: torch.Tensor) -> torch.Tensor:
        return torch.pow(self.gamma, staleness_BT.float())

    def gate(self, mask_BT: torch.Tensor, staleness_BT: torch.Tensor) -> torch.Tensor:
        return mask_BT if self.ceiling < 0 else mask_BT & (staleness_BT <= self.ceiling)
