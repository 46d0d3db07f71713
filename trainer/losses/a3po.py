"""A-3PO: decoupled PPO whose proximal policy is interpolated instead of computed.

    prox = α · behaviour + (1 − α) · sg(new),   α = 1/s for s ≥ 1, else 1

The older the token, the nearer to the present the trust region lies; it saves the forward pass of the step-start policy.
Source: A-3PO (2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.losses.decoupled import DecoupledPpo
from trainer.losses.inputs import LossInputs, Need, bounded


@dataclass(frozen=True)
class A3po(DecoupledPpo):
    """As DecoupledPpo."""

    def proximal(self, inputs: LossInputs) -> torch.Tensor:
        alpha_BT = 1.0 / inputs.staleness_BT.clamp(min=1)
        return alpha_BT * bounded(inputs.behaviour_BT) + (1.0 - alpha_BT) * bounded(inputs.new_BT.detach())

    def needs(self) -> frozenset[Need]:
        return frozenset()
