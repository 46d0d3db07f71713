"""Decoupled PPO: the trust region lies around a proximal policy, the data may be older than that.

    −sg(e^{prox − behaviour}) · min(u A, clip(u) A),   u = e^{new − prox}

The weight corrects for who sampled, the clip for how far this step goes. A weight beyond the cap is truncated to it, or
its token is masked. With one update per step prox = new at the step's start, so u = 1 and nothing is ever clipped.
Source: AReaL (2025), behaviour weights capped at 5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.losses.base import Loss, TokenLoss, one_of, within
from trainer.losses.inputs import LossInputs, Need, masked_mean, ratio
from trainer.losses.ppo import clipped


@dataclass(frozen=True)
class DecoupledPpo(Loss):
    """`cap`: largest weight. `beyond`: what happens to a token beyond it, `mask` or `truncate`."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    cap: float = 5.0
    beyond: str = "mask"

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = type(self).__name__.lower()
        within(owner, "clip_low", self.clip_low, 0.0, 1.0, open_low=True)
        within(owner, "clip_high", self.clip_high, 0.0, float("inf"), open_low=True)
        within(owner, "cap", self.cap, 1.0, float("inf"))
        one_of(owner, "beyond", self.beyond, ("mask", "truncate"))

    def proximal(self, inputs: LossInputs) -> torch.Tensor:
        """[B, T] log-probs of the policy around which the trust region lies; without gradient."""
        return inputs.need(Need.PROX)

    def needs(self) -> frozenset[Need]:
        return frozenset({Need.PROX})

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        prox_BT = self.proximal(inputs)
        weight_BT = ratio(prox_BT, inputs.behaviour_BT)
        beyond_BT = weight_BT > self.cap
        loss_BT, kept_BT = clipped(ratio(inputs.new_BT, prox_BT), inputs.advantage_BT, self.clip_low, self.clip_high)
        loss_BT = weight_BT.clamp(max=self.cap) * loss_BT
        metrics = {"weight_capped": masked_mean(beyond_BT, inputs.mask_BT)}
        if self.beyond == "mask":
            return TokenLoss(torch.where(beyond_BT, 0.0, loss_BT), kept_BT & ~beyond_BT, metrics)
        return TokenLoss(loss_BT, kept_BT, metrics)
