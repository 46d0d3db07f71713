"""What all objectives share: inputs, output, aggregation, ratios that cannot overflow.

Shapes: B completions, T tokens of a completion. Per token: `new` = log π_θ now (with gradient), `old` = the trusted
log-prob of the version that generated it, `behaviour` = what the ratio is taken against (by default `old`),
A = advantage, s = staleness in versions; ρ = exp(new − behaviour), Δp = e^new − e^behaviour.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from protocol.errors import UserError

# exp(±30) is finite in float32 and in the products that the losses form; real ratios are nowhere near.
MAX_LOG_RATIO = 30.0
# Below e^-100 a probability is 0 for every purpose; keeps −inf − (−inf) out.
MIN_LOGPROB = -100.0


class Aggregation(StrEnum):
    """How per-token losses become one number; the denominator is over all ranks and microbatches of a step.

    TOKEN: Σ / number of valid tokens. SEQUENCE: mean over completions of their means. CONSTANT: Σ / (`constant_length`
    × number of completions), as in Dr. GRPO, which frees the gradient from the lengths.
    """

    TOKEN = "token"
    SEQUENCE = "sequence"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class LossInputs:
    """All [B, T]. `mask_BT` (bool): tokens that count; the other fields may hold anything, even NaN, elsewhere.

    `staleness_BT` (integer, versions). Only `new_BT` has a gradient.
    """

    new_BT: torch.Tensor
    old_BT: torch.Tensor
    behaviour_BT: torch.Tensor
    advantage_BT: torch.Tensor
    mask_BT: torch.Tensor
    staleness_BT: torch.Tensor

    def cleaned(self) -> LossInputs:
        """The same with 0 wherever the mask is False, by selection: multiplying would turn 0 × inf into NaN."""
        fields = ("new_BT", "old_BT", "behaviour_BT", "advantage_BT", "staleness_BT")
        return replace(self, **{name: torch.where(self.mask_BT, getattr(self, name), 0) for name in fields})

    def with_behaviour(self, tolerance: float) -> LossInputs:
        """The same with the worker's claims confined to `old` ± `tolerance` nats; 0 uses `old` alone (the default)."""
        return replace(self, behaviour_BT=clamp_behaviour(self.behaviour_BT, self.old_BT, tolerance))


@dataclass(frozen=True, slots=True)
class LossOutput:
    """`loss`: a scalar to call backward on. `kept_BT` (bool): tokens whose policy gradient was not cut to zero.

    `metrics`: floats of this objective alone, as means over the masked tokens.
    """

    loss: torch.Tensor
    kept_BT: torch.Tensor
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Per-token losses before aggregation. `kept_BT` (bool): tokens with a policy gradient."""

    loss_BT: torch.Tensor
    kept_BT: torch.Tensor
    metrics: dict[str, float]


@dataclass(frozen=True)
class Loss(ABC):
    """An objective. Its fields are its parameters, by the names that a run file uses.

    Subclasses say what a token costs (`token_loss`) and which tokens are gated away as too stale (`gate`). Tokens that
    a trust region cuts stay in the denominator; gated ones leave it.
    """

    aggregation: str = Aggregation.TOKEN
    constant_length: int = 0

    def __post_init__(self) -> None:
        if self.aggregation not in list(Aggregation):
            raise UserError(f"loss: aggregation must be one of {', '.join(Aggregation)}, got {self.aggregation!r}")
        if self.aggregation == Aggregation.CONSTANT and self.constant_length < 1:
            raise UserError("loss: aggregation 'constant' needs constant_length, a number of tokens")

    @abstractmethod
    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        """Losses per token; `inputs` are cleaned, values outside the mask are ignored."""

    def gate(self, mask_BT: torch.Tensor, staleness_BT: torch.Tensor) -> torch.Tensor:
        """The tokens of `mask_BT` that take part at all."""
        return mask_BT

    def denominator(self, mask_BT: torch.Tensor, staleness_BT: torch.Tensor) -> float:
        """This batch's share of the step's denominator; sum it over microbatches (and ranks) before `__call__`."""
        taking_part = self.gate(mask_BT, staleness_BT)
        if self.aggregation == Aggregation.TOKEN:
            return float(taking_part.sum())
        completions = float(taking_part.any(dim=1).sum())
        return completions * (self.constant_length if self.aggregation == Aggregation.CONSTANT else 1)

    def __call__(self, inputs: LossInputs, denominator: float | None = None) -> LossOutput:
        """The loss of a microbatch as its share of a step with `denominator` (None: the batch is the whole step)."""
        gated = replace(inputs, mask_BT=self.gate(inputs.mask_BT, inputs.staleness_BT)).cleaned()
        result = self.token_loss(gated)
        if denominator is None:
            denominator = self.denominator(inputs.mask_BT, inputs.staleness_BT)
        loss_BT = torch.where(gated.mask_BT, result.loss_BT, 0.0)
        if self.aggregation == Aggregation.SEQUENCE:
            loss_BT = loss_BT / gated.mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        # An empty step gives 0 with a gradient of 0, not 0 / 0.
        loss = loss_BT.sum() / max(denominator, 1.0)
        return LossOutput(loss, result.kept_BT & gated.mask_BT, result.metrics)


def ratio(new_BT: torch.Tensor, reference_BT: torch.Tensor) -> torch.Tensor:
    """exp(new − reference), finite whatever comes, with the gradient of `new`."""
    return log_ratio(new_BT, reference_BT).exp()


def log_ratio(new_BT: torch.Tensor, reference_BT: torch.Tensor) -> torch.Tensor:
    """new − reference in ±MAX_LOG_RATIO; beyond it the gradient is 0."""
    difference = new_BT.clamp(min=MIN_LOGPROB) - reference_BT.clamp(min=MIN_LOGPROB)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clamp_behaviour(behaviour_BT: torch.Tensor, old_BT: torch.Tensor, tolerance: float) -> torch.Tensor:
    """A worker's log-probs confined to the trusted ones ± `tolerance` (nats, ≥ 0); where not a number, the trusted."""
    if tolerance < 0:
        raise UserError(f"loss: behaviour_tolerance must be at least 0, got {tolerance}")
    claimed = torch.where(torch.isnan(behaviour_BT), old_BT, behaviour_BT)
    return torch.minimum(torch.maximum(claimed, old_BT - tolerance), old_BT + tolerance)


def masked_mean(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> float:
    """Mean over the mask, 0.0 if it is empty."""
    count = int(mask_BT.sum())
    return float(torch.where(mask_BT, values_BT.detach().float(), 0.0).sum()) / count if count else 0.0
