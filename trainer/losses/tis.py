"""Truncated importance sampling: PPO against the trusted values, weighted by the engines' mismatch.

    −sg(min(w, C)) · min(r A, clip(r) A),   w = exp(old − behaviour), r = exp(new − old)

Mismatch of engines and movement of the policy stay two ratios: the first only weighs, the second is clipped. w is 1
unless the run lets workers' log-probs in (`behaviour_tolerance` above 0). Source: TIS (Yao et al. 2025); C = 2 in verl, 4
in the asynchronous chapter.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import UserError
from trainer.losses.base import TokenLoss
from trainer.losses.inputs import LossInputs, masked_mean, ratio
from trainer.losses.ppo import Ppo, clipped


@dataclass(frozen=True)
class Tis(Ppo):
    """`cap`: C, the largest weight."""

    against: str = "old"
    cap: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cap < 1.0:
            raise UserError(f"tis: cap must be at least 1, got {self.cap}")

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        weight_BT = ratio(self.reference(inputs), inputs.behaviour_BT).detach()
        loss_BT, kept_BT = clipped(self.ratio(inputs), inputs.advantage_BT, self.clip_low, self.clip_high)
        metrics = {"weight_capped": masked_mean(weight_BT > self.cap, inputs.mask_BT)}
        return TokenLoss(weight_BT.clamp(max=self.cap) * loss_BT, kept_BT, metrics)
