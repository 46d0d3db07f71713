"""DPPO: the trust region is a divergence, and only tokens that moved outward lose their gradient.

    masked where A > 0 and Δp > δ, or A < 0 and Δp < −δ;   else −A · sg(min(ρ, 20)) · new;   + τ (new − behaviour)²

`divergence = "tv"` measures |Δp|; `"kl"` the KL divergence of the two Bernoulli distributions "this token or another",
behaviour against new, with the same direction rule; its δ is then in nats, and a smaller one fits (say 0.05). Sources:
DPPO (2026); the quadratic term as in Kimi K2.5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.losses.against import RatioLoss
from trainer.losses.base import TokenLoss, one_of, surrogate, within
from trainer.losses.inputs import LossInputs

_CLOSEST = 1e-6  # of a probability to 0 or 1: log1p of float32 stays finite


@dataclass(frozen=True)
class Dppo(RatioLoss):
    """`delta`: the trusted divergence. `cap`: largest weight. `tau`: weight of the quadratic term."""

    delta: float = 0.2
    divergence: str = "tv"
    cap: float = 20.0
    tau: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("dppo", "divergence", self.divergence, ("tv", "kl"))
        within("dppo", "delta", self.delta, 0.0, float("inf"), open_low=True)
        within("dppo", "cap", self.cap, 1.0, float("inf"))
        within("dppo", "tau", self.tau, 0.0, float("inf"))

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        new_BT, before_BT = inputs.new_BT.detach().exp(), self.reference(inputs).exp()
        moved_BT = new_BT - before_BT
        far_BT = (moved_BT.abs() if self.divergence == "tv" else binary_kl(before_BT, new_BT)) > self.delta
        kept_BT = ~(far_BT & (moved_BT * inputs.advantage_BT > 0))
        log_ratio_BT = self.log_ratio(inputs)
        policy_BT = surrogate(log_ratio_BT.exp().clamp(max=self.cap), inputs)
        loss_BT = torch.where(kept_BT, policy_BT, 0.0) + self.tau * log_ratio_BT.square()
        return TokenLoss(loss_BT, kept_BT, {})


def binary_kl(p_BT: torch.Tensor, q_BT: torch.Tensor) -> torch.Tensor:
    """KL(Bernoulli(p) ‖ Bernoulli(q)) in nats, finite: probabilities are kept off 0 and 1."""
    p_BT, q_BT = p_BT.clamp(_CLOSEST, 1.0 - _CLOSEST), q_BT.clamp(_CLOSEST, 1.0 - _CLOSEST)
    return p_BT * (p_BT / q_BT).log() + (1.0 - p_BT) * (torch.log1p(-p_BT) - torch.log1p(-q_BT))
