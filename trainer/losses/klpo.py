"""KLPO: the policy gradient of a reward minus β times the movement, with the score function centred by sampled tokens.

    −sg(R − β ℓ_t) · (new − mean_j log p(v_j)),   ℓ_t = new − behaviour,   v_j drawn from the sampler

Subtracting the mean log-prob of M other draws takes out what every token of the place has in common, without a bias. With
`draws = 0` the mean is taken exactly over the two outcomes "this token" and "another one", which needs no draws:
p·new + (1 − p)·log(1 − e^new), p = e^behaviour. R is whatever the run's advantage gives. Which policy ℓ_t is measured
from is left open; `anchor` says `behaviour` (our default) or `reference`. Source: KLPO (2026).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from protocol.errors import UserError
from trainer.losses.base import Loss, TokenLoss, one_of, within
from trainer.losses.inputs import LossInputs, Need, bounded, log_ratio

_CLOSEST = 1e-6  # of a probability to 1: log1p(−p) and its gradient stay finite


@dataclass(frozen=True)
class Klpo(Loss):
    """`beta`: weight of the movement. `draws`: M, 0 for the binary variant. `anchor`: what ℓ_t is measured from."""

    beta: float = 0.1
    draws: int = 0
    anchor: str = "behaviour"

    def __post_init__(self) -> None:
        super().__post_init__()
        within("klpo", "beta", self.beta, 0.0, float("inf"))
        one_of("klpo", "anchor", self.anchor, ("behaviour", "reference"))
        if self.draws < 0:
            raise UserError(f"klpo: draws must be at least 0, got {self.draws}")

    def needs(self) -> frozenset[Need]:
        needs = {Need.DRAWS} if self.draws else set()
        return frozenset(needs | ({Need.REFERENCE} if self.anchor == "reference" else set()))

    def alternatives(self) -> int:
        return self.draws

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        anchor_BT = inputs.need(Need.REFERENCE) if self.anchor == "reference" else inputs.behaviour_BT
        gain_BT = inputs.advantage_BT - self.beta * log_ratio(inputs.new_BT, anchor_BT).detach()
        centre_BT = self._sampled_mean(inputs) if self.draws else _binary_mean(inputs)
        return TokenLoss(-gain_BT * (bounded(inputs.new_BT) - centre_BT), torch.ones_like(inputs.mask_BT), {})

    def _sampled_mean(self, inputs: LossInputs) -> torch.Tensor:
        return bounded(inputs.alternatives().new_BTM).mean(dim=-1)


def _binary_mean(inputs: LossInputs) -> torch.Tensor:
    """E[log p] over "this token" and "another one", drawn by the behaviour policy."""
    p_BT = inputs.behaviour_BT.exp().clamp(max=1.0 - _CLOSEST)
    new_BT = bounded(inputs.new_BT)
    other_BT = torch.log1p(-new_BT.exp().clamp(max=1.0 - _CLOSEST))
    return p_BT * new_BT + (1.0 - p_BT) * other_BT
