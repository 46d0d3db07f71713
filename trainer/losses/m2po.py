"""M2PO: the trust region is a second moment: only as many outliers are clipped as must be.

    over tokens that move outward (A > 0 ∧ ρ > 1, or A < 0 ∧ ρ < 1), Δ = new − behaviour: the largest cap with
    mean min(Δ², cap²) ≤ 0.04;   PPO with bounds e^{∓cap}, never tighter than 1 − 0.2 and 1 + 0.28

Nothing is clipped while the moment is within its budget. The cap is found over the microbatch, the paper's over the batch:
give microbatches enough tokens. Sources: M2PO (2025), AReaL.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.losses.base import TokenLoss, within
from trainer.losses.inputs import MAX_LOG_RATIO, LossInputs
from trainer.losses.ppo import Ppo, clipped


@dataclass(frozen=True)
class M2po(Ppo):
    """`moment`: the budget of mean min(Δ², cap²). `clip_low`, `clip_high`: bounds that it never gets tighter than."""

    moment: float = 0.04

    def __post_init__(self) -> None:
        super().__post_init__()
        within("m2po", "moment", self.moment, 0.0, float("inf"), open_low=True)

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        log_ratio_BT = self.log_ratio(inputs)
        moved_BT = log_ratio_BT.detach()
        outward_BT = inputs.mask_BT & (moved_BT * inputs.advantage_BT > 0)
        cap = second_moment_cap(moved_BT[outward_BT], self.moment)
        low = max(self.clip_low, 1.0 - float(torch.tensor(-cap).exp()))
        high = max(self.clip_high, float(torch.tensor(cap).exp()) - 1.0)
        return TokenLoss(*clipped(log_ratio_BT.exp(), inputs.advantage_BT, low, high), {"m2po_cap": cap})


def second_moment_cap(moved_N: torch.Tensor, moment: float) -> float:
    """The largest cap with mean min(Δ², cap²) ≤ `moment`; MAX_LOG_RATIO (no cap) where the mean is within it."""
    square_N = moved_N.double().square().sort().values
    count = square_N.numel()
    if count == 0 or float(square_N.mean()) <= moment:
        return MAX_LOG_RATIO
    # With the k smallest left as they are: Σ_k Δ² + (n − k) cap² = n · moment, right for the first k whose successor
    # the cap does not reach.
    below_N = torch.cat([square_N.new_zeros(1), square_N.cumsum(0)[:-1]])
    remaining_N = torch.arange(count, 0, -1, dtype=square_N.dtype, device=square_N.device)
    cap_N = (count * moment - below_N) / remaining_N
    first = int((cap_N <= square_N).nonzero()[0])
    return float(cap_N[first].clamp(min=0.0).sqrt())
