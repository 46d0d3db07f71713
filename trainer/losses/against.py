"""Losses of one ratio: what it is taken against is a choice of the run.

Published methods take it against what the inference engine reported. That is `behaviour` here, which is the trusted
value unless the run lets workers' claims in (`behaviour_tolerance`); `old` is the trusted value always; `prox` the
step-start policy, which leaves the policy's movement before this step out of the trust region.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.losses.base import Loss, one_of
from trainer.losses.inputs import LossInputs, Need, log_ratio

AGAINST = ("behaviour", "old", "prox")


@dataclass(frozen=True)
class RatioLoss(Loss):
    """`against`: the denominator of the ratio, one of `behaviour` (ρ), `old` (r), `prox` (u)."""

    against: str = "behaviour"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("loss", "against", self.against, AGAINST)

    def reference(self, inputs: LossInputs) -> torch.Tensor:
        """[B, T] log-probs that the ratio is taken against."""
        if self.against == "prox":
            return inputs.need(Need.PROX)
        return inputs.old_BT if self.against == "old" else inputs.behaviour_BT

    def needs(self) -> frozenset[Need]:
        return frozenset({Need.PROX}) if self.against == "prox" else frozenset()

    def log_ratio(self, inputs: LossInputs) -> torch.Tensor:
        """[B, T], with the gradient of `new`."""
        return log_ratio(inputs.new_BT, self.reference(inputs))

    def ratio(self, inputs: LossInputs) -> torch.Tensor:
        """[B, T], with the gradient of `new`."""
        return self.log_ratio(inputs).exp()
