"""What every objective is given, and ratios of it that cannot overflow.

Shapes: B completions, T tokens of a completion, M other tokens for each place. Per token: `new` = log π_θ now (with
gradient), `old` = the trusted log-prob of the version that generated it, `behaviour` = what the ratio is taken against
(by default `old`), A = advantage, s = staleness in versions; ρ = exp(new − behaviour), r = exp(new − old),
w = exp(old − behaviour), Δp = e^new − e^behaviour. All log-probs are of the distribution that was sampled from.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum

import torch

from protocol.errors import OurFault, UserError

# exp(±30) is finite in float32 and in the products that the losses form; real ratios are nowhere near.
MAX_LOG_RATIO = 30.0
# Below e^-100 a probability is 0 for every purpose; keeps −inf − (−inf) out.
MIN_LOGPROB = -100.0


class Need(StrEnum):
    """What an objective needs beyond `new`, `old`, `behaviour` and the advantage; who supplies it must be settled
    before the first step, not when the first batch has come."""

    PROX = "prox"  # log-probs at the start of the step: a forward pass, unless the step has one update
    EWMA = "ewma"  # log-probs under a moving average of the weights
    REFERENCE = "reference"  # log-probs under the initial policy
    TEACHER = "teacher"  # log-probs under a teacher
    ENTROPY = "entropy"  # entropies with a gradient
    DRAWS = "draws"  # M tokens drawn at each place from the sampler
    TOP_K = "top_k"  # the policy's M likeliest tokens at each place
    TEACHER_DRAWS = "teacher_draws"  # M tokens drawn at each place from the teacher


@dataclass(frozen=True, slots=True)
class Alternatives:
    """M tokens at each place besides the one that was taken. All [B, T, M].

    `new_BTM` has the gradient. `sampler_BTM`: log-probs under what they were drawn from. `teacher_BTM`: the teacher's.
    """

    new_BTM: torch.Tensor
    sampler_BTM: torch.Tensor
    teacher_BTM: torch.Tensor | None = None

    def cleaned(self, mask_BT: torch.Tensor) -> Alternatives:
        """The same with 0 wherever the mask is False."""
        mask_BTM = mask_BT[..., None]
        parts = {name: getattr(self, name) for name in ("new_BTM", "sampler_BTM", "teacher_BTM")}
        return Alternatives(
            **{name: None if part is None else torch.where(mask_BTM, part, 0.0) for name, part in parts.items()}
        )


@dataclass(frozen=True, slots=True)
class LossInputs:
    """All [B, T]. `mask_BT` (bool): tokens that count; the other fields may hold anything, even NaN, elsewhere.

    `staleness_BT` (integer, versions). Only `new_BT`, `entropy_BT` and `others.new_BTM` have a gradient. What comes after
    `staleness_BT` is there if the objective needs it (`Need`).
    """

    new_BT: torch.Tensor
    old_BT: torch.Tensor
    behaviour_BT: torch.Tensor
    advantage_BT: torch.Tensor
    mask_BT: torch.Tensor
    staleness_BT: torch.Tensor
    prox_BT: torch.Tensor | None = None
    ewma_BT: torch.Tensor | None = None
    reference_BT: torch.Tensor | None = None
    teacher_BT: torch.Tensor | None = None
    entropy_BT: torch.Tensor | None = None
    others: Alternatives | None = None

    def cleaned(self) -> LossInputs:
        """The same with 0 wherever the mask is False, by selection: multiplying would turn 0 × inf into NaN."""
        clean = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor) and field.name != "mask_BT":
                clean[field.name] = torch.where(self.mask_BT, value, 0)
        others = None if self.others is None else self.others.cleaned(self.mask_BT)
        return replace(self, **clean, others=others)

    def with_behaviour(self, tolerance: float) -> LossInputs:
        """The same with the worker's claims confined to `old` ± `tolerance` nats; 0 uses `old` alone (the default)."""
        return replace(self, behaviour_BT=clamp_behaviour(self.behaviour_BT, self.old_BT, tolerance))

    def need(self, need: Need) -> torch.Tensor:
        """The log-probs (or entropies) that `need` names. Raises OurFault if they were not supplied."""
        value = getattr(self, f"{need.value}_BT")
        if value is None:
            raise OurFault(f"the objective needs {need.value} values, and the step was made without them")
        return torch.as_tensor(value)

    def alternatives(self) -> Alternatives:
        """The other tokens of each place. Raises OurFault if they were not supplied."""
        if self.others is None:
            raise OurFault("the objective needs other tokens at each place, and the step was made without them")
        return self.others


def ratio(new_BT: torch.Tensor, reference_BT: torch.Tensor) -> torch.Tensor:
    """exp(new − reference), finite whatever comes, with the gradient of `new`."""
    return log_ratio(new_BT, reference_BT).exp()


def log_ratio(new_BT: torch.Tensor, reference_BT: torch.Tensor) -> torch.Tensor:
    """new − reference in ±MAX_LOG_RATIO; beyond it the gradient is 0."""
    difference = bounded(new_BT) - bounded(reference_BT)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def bounded(logprob_BT: torch.Tensor) -> torch.Tensor:
    """Log-probs that are finite."""
    return logprob_BT.clamp(min=MIN_LOGPROB)


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
