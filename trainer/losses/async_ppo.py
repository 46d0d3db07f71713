"""PPO for asynchronous training: the ratio truncated at a ceiling, tokens older than a bound gated away.

    PPO on min(ρ, C), for tokens with s ≤ s_max

Equals INTELLECT-2's two-sided clip at δ = C, plus the gate. The approximate KL among the metrics uses the ratio before
truncation, or it would look calm exactly when it is not. Source: the asynchronous chapter of the RLHF book.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from protocol.errors import UserError
from trainer.losses.base import TokenLoss
from trainer.losses.inputs import LossInputs
from trainer.losses.ppo import Ppo
from trainer.losses.two_sided import truncated_ppo


@dataclass(frozen=True)
class AsyncPpo(Ppo):
    """`ceiling`: C. `max_staleness`: s_max in versions; older tokens leave the denominator too. −1 means no gate."""

    ceiling: float = 4.0
    max_staleness: int = -1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ceiling <= 1.0 + self.clip_high:
            raise UserError(
                f"async_ppo: ceiling must be above 1 + clip_high = {1 + self.clip_high}, got {self.ceiling}"
            )
        if self.max_staleness < -1:
            raise UserError(f"async_ppo: max_staleness must be at least 0, or -1 for none, got {self.max_staleness}")

    def gate(self, mask_BT: torch.Tensor, staleness_BT: torch.Tensor) -> torch.Tensor:
        return mask_BT if self.max_staleness < 0 else mask_BT & (staleness_BT <= self.max_staleness)

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        return truncated_ppo(self.ratio(inputs), inputs, self.ceiling, self.clip_low, self.clip_high)
