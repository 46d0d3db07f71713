"""A reward for staying undecided: −β · H(π_θ(· | place)), exact over the vocabulary, with its own gradient.

It is the entropy at the temperature that the run samples at. Source: Williams & Peng 1991; A3C (Mnih et al. 2016).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.losses.base import Regularizer, within
from trainer.losses.inputs import LossInputs, Need


@dataclass(frozen=True)
class EntropyBonus(Regularizer):
    """`beta`: weight, per nat."""

    beta: float = 0.001

    def __post_init__(self) -> None:
        within("entropy", "beta", self.beta, 0.0, float("inf"))

    def needs(self) -> frozenset[Need]:
        return frozenset({Need.ENTROPY})

    def term(self, inputs: LossInputs) -> torch.Tensor:
        return -self.beta * inputs.need(Need.ENTROPY)
