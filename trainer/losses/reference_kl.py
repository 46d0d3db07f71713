"""A penalty for leaving the initial policy.

    k3:  β · (e^{ref − new} − 1 − (ref − new)), gradient through new     (as in GRPO)
    k1:  β · sg(new − ref) · new                                        (the score-function gradient of KL(new ‖ ref))

k1 written as a loss, β (new − ref), would have a gradient whose mean is 0: that is the well-known mistake, so its
gradient is spelled out. Both hold for tokens that the present policy sampled; on stale ones they are approximations.
Sources: DeepSeekMath (2024); Tang & Munos, "On a few pitfalls in KL divergence gradient estimation" (2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.losses.base import Regularizer, one_of, within
from trainer.losses.inputs import LossInputs, Need, bounded, log_ratio


@dataclass(frozen=True)
class ReferenceKl(Regularizer):
    """`beta`: weight. `estimator`: `k1` or `k3`."""

    beta: float = 0.001
    estimator: str = "k3"

    def __post_init__(self) -> None:
        within("reference_kl", "beta", self.beta, 0.0, float("inf"))
        one_of("reference_kl", "estimator", self.estimator, ("k1", "k3"))

    def needs(self) -> frozenset[Need]:
        return frozenset({Need.REFERENCE})

    def term(self, inputs: LossInputs) -> torch.Tensor:
        moved_BT = log_ratio(inputs.new_BT, inputs.need(Need.REFERENCE))
        if self.estimator == "k1":
            return self.beta * moved_BT.detach() * bounded(inputs.new_BT)
        return self.beta * ((-moved_BT).exp() - 1.0 + moved_BT)
