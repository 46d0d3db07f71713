"""Sequence drop (wraps any loss): a completion whose ratio as a whole is off costs nothing.

    band:     keep where low ≤ exp(mean_t(new − behaviour)) ≤ high          (verl: 0.999 and 1.001)
    product:  keep where exp(Σ_t(new − behaviour)) ≤ c, upper side only     (the asynchronous chapter: c = 8)

It is a trust region: what it drops stays in the denominator. (verl takes it out; with few completions kept, that makes the
step larger just when the data is worse.) Sources: verl's rollout correction; the asynchronous chapter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from protocol.errors import UserError
from trainer.losses.base import Modifier, one_of
from trainer.losses.inputs import LossInputs, log_ratio


@dataclass(frozen=True)
class SeqDrop(Modifier):
    """`rule`: `band` or `product`. `low`, `high`: the band. `bound`: c."""

    rule: str = "band"
    low: float = 0.999
    high: float = 1.001
    bound: float = 8.0

    def __post_init__(self) -> None:
        one_of("seq_drop", "rule", self.rule, ("band", "product"))
        if not 0.0 <= self.low < 1.0 < self.high:
            raise UserError(f"seq_drop: low and high must enclose 1, got {self.low} and {self.high}")
        if self.bound <= 1.0:
            raise UserError(f"seq_drop: bound must be above 1, got {self.bound}")

    def keep(self, inputs: LossInputs) -> torch.Tensor:
        total_B1 = log_ratio(inputs.new_BT, inputs.behaviour_BT).detach().double().sum(dim=1, keepdim=True)
        if self.rule == "product":
            keep_B1 = total_B1 <= torch.tensor(self.bound, dtype=torch.float64).log()
        else:
            mean_B1 = (total_B1 / inputs.mask_BT.sum(dim=1, keepdim=True).clamp(min=1)).exp()
            keep_B1 = (mean_B1 >= self.low) & (mean_B1 <= self.high)
        return keep_B1.expand_as(inputs.mask_BT)
