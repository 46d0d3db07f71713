"""SAT: clip bounds that narrow for the tokens that are farthest off-policy.

    q = 0.9-quantile of |sg(new − behaviour)|;   x = |new − behaviour| > q narrows ε on that side by a Hill kernel,
    ε(x) = ε / (1 + ((x − q) / q)²),   then PPO

Nine tokens of ten keep PPO's bounds. The kernel's origin is left open; we start it at q, so that ε is continuous there.
The quantile is over the microbatch. Source: SAT (2026).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainer.losses.base import TokenLoss, within
from trainer.losses.inputs import LossInputs
from trainer.losses.ppo import Ppo, clipped

_SMALLEST = 1e-6  # nats; a quantile below it is no scale to measure by


@dataclass(frozen=True)
class Sat(Ppo):
    """`quantile`: share of tokens with PPO's own bounds. `exponent`: of the Hill kernel."""

    quantile: float = 0.9
    exponent: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        within("sat", "quantile", self.quantile, 0.0, 1.0)
        within("sat", "exponent", self.exponent, 0.0, float("inf"), open_low=True)

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        log_ratio_BT = self.log_ratio(inputs)
        moved_BT = log_ratio_BT.detach()
        kernel_BT = hill(moved_BT.abs(), _quantile(moved_BT.abs()[inputs.mask_BT], self.quantile), self.exponent)
        low_BT = torch.where(moved_BT < 0, self.clip_low * kernel_BT, self.clip_low)
        high_BT = torch.where(moved_BT > 0, self.clip_high * kernel_BT, self.clip_high)
        return TokenLoss(*clipped(log_ratio_BT.exp(), inputs.advantage_BT, low_BT, high_BT), {})


def hill(distance_BT: torch.Tensor, start: float, exponent: float) -> torch.Tensor:
    """1 up to `start`, then 1 / (1 + ((x − start) / start)^exponent)."""
    scale = max(start, _SMALLEST)
    return 1.0 / (1.0 + ((distance_BT - scale).clamp(min=0.0) / scale).pow(exponent))


def _quantile(values_N: torch.Tensor, share: float) -> float:
    """By the nearest rank from above (torch.quantile refuses more than 2^24 values)."""
    if values_N.numel() == 0:
        return 0.0
    rank = min(values_N.numel() - 1, int(share * values_N.numel()))
    return float(values_N.sort().values[rank])
