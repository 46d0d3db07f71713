"""PPO-EWMA: decoupled PPO whose proximal policy is an exponentially weighted average of the weights.

    as decoupled PPO with prox = log-probs under the averaged weights

The average lags behind by a fixed number of optimizer steps (`ewma_decay` of the trainer), whatever the data's age, so the
trust region does not depend on how the work was batched. Sources: Hilton et al. 2022; arXiv 2605.12070.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.losses.decoupled import DecoupledPpo
from trainer.losses.inputs import LossInputs, Need


@dataclass(frozen=True)
class PpoEwma(DecoupledPpo):
    """As DecoupledPpo."""

    def proximal(self, inputs: LossInputs) -> torch.Tensor:
        return inputs.need(Need.EWMA)

    def needs(self) -> frozenset[Need]:
        return frozenset({Need.EWMA})
