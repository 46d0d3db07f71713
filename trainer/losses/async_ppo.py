"""PPO for asynchronous training: the ratio truncated at a ceiling, tokens older than a bound gated away.

    PPO on min(ρ, C), for tokens with s ≤ s_max

Without the ceiling a negative advantage times a huge ratio makes an unbounded loss, since PPO's minimum takes the
unclipped side there. Where ρ > C the gradient is 0. Equals INTELLECT-2's two-sided clip at δ = C, plus the gate.
The approximate KL among the metrics uses the ratio before truncation, or it would look calm exactly when it is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from protocol.errors import UserError
from trainer.losses.base import LossInputs, TokenLoss, masked_mean, ratio
from trainer.losses.ppo import Ppo, clipped


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
        ratio_BT = ratio(inputs.new_BT, inputs.behaviour_BT)
        loss_BT, inside_BT = clipped(
            ratio_BT.clamp(max=self.ceiling), inputs.advantage_BT, self.clip_low, self.clip_high
        )
        truncated_BT = ratio_BT.detach() > self.ceiling
        metrics = {"ratio_truncated": masked_mean(truncated_BT, inputs.mask_BT)}
        return TokenLoss(loss_BT, inside_BT & ~truncated_BT, metrics)
