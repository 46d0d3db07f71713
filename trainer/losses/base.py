"""What an objective is made of: a loss per token, modifiers around it, regularizers beside it, and one sum.

Shapes and letters: `trainer.losses.inputs`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from protocol.errors import UserError
from trainer.losses.inputs import LossInputs, Need, bounded


class Aggregation(StrEnum):
    """How per-token losses become one number; the denominator is over all ranks and microbatches of a step.

    TOKEN: Σ / number of valid tokens. SEQUENCE: mean over completions of their means. CONSTANT: Σ / (`constant_length`
    × number of completions), as in Dr. GRPO, which frees the gradient from the lengths.
    """

    TOKEN = "token"
    SEQUENCE = "sequence"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class LossOutput:
    """`loss`: a scalar to call backward on. `kept_BT` (bool): tokens whose policy gradient was not cut to zero.

    `loss_BT`: what each token adds to the loss, without gradient. `metrics`: floats of this objective alone, as means
    over the masked tokens.
    """

    loss: torch.Tensor
    kept_BT: torch.Tensor
    metrics: dict[str, float]
    loss_BT: torch.Tensor


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Per-token losses before aggregation. `kept_BT` (bool): tokens with a policy gradient."""

    loss_BT: torch.Tensor
    kept_BT: torch.Tensor
    metrics: dict[str, float]


@dataclass(frozen=True)
class Loss(ABC):
    """A loss per token. Its fields are its parameters, by the names that a run file uses.

    Subclasses say what a token costs (`token_loss`) and which tokens are gated away as too stale (`gate`). Tokens that
    a trust region cuts stay in the denominator; gated ones leave it.
    """

    aggregation: str = Aggregation.TOKEN
    constant_length: int = 0

    def __post_init__(self) -> None:
        one_of("loss", "aggregation", self.aggregation, list(Aggregation))
        if self.aggregation == Aggregation.CONSTANT and self.constant_length < 1:
            raise UserError("loss: aggregation 'constant' needs constant_length, a number of tokens")
        if self.aggregation != Aggregation.CONSTANT and self.constant_length:
            raise UserError(f"loss: constant_length is of aggregation 'constant', not of {str(self.aggregation)!r}")

    @abstractmethod
    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        """Losses per token; `inputs` are cleaned, values outside the mask are ignored."""

    def gate(self, mask_BT: torch.Tensor, staleness_BT: torch.Tensor) -> torch.Tensor:
        """The tokens of `mask_BT` that take part at all."""
        return mask_BT

    def needs(self) -> frozenset[Need]:
        """What `token_loss` reads beyond the inputs that are always there."""
        return frozenset()

    def alternatives(self) -> int:
        """M, where `needs` names other tokens at each place."""
        return 0

    def uses_advantages(self) -> bool:
        """Whether groups without an advantage teach nothing."""
        return True

    def denominator(self, mask_BT: torch.Tensor, staleness_BT: torch.Tensor) -> float:
        """This batch's share of the step's denominator, for the loss alone."""
        return Objective(self).denominator(mask_BT, staleness_BT)

    def __call__(self, inputs: LossInputs, denominator: float | None = None) -> LossOutput:
        """The loss alone, without modifiers and regularizers."""
        return Objective(self)(inputs, denominator)


@dataclass(frozen=True)
class Modifier:
    """Something around any loss (OBJECTIVES: "wraps"): the hooks that a subclass overrides are what it does."""

    def weight(self, staleness_BT: torch.Tensor) -> torch.Tensor:
        """Weights per token; they are in numerator and denominator."""
        return torch.ones(staleness_BT.shape, device=staleness_BT.device)

    def gate(self, mask_BT: torch.Tensor, staleness_BT: torch.Tensor) -> torch.Tensor:
        """The tokens of `mask_BT` that take part at all; the others leave the denominator."""
        return mask_BT

    def keep(self, inputs: LossInputs) -> torch.Tensor:
        """[B, T] (bool): tokens whose loss counts; the others cost 0 and stay in the denominator."""
        return torch.ones_like(inputs.mask_BT)

    def rate_scale(self, log_weights: Sequence[float]) -> float:
        """Factor of the learning rate, from each completion's Σ (new − behaviour)."""
        return 1.0

    def needs(self) -> frozenset[Need]:
        """What the hooks read beyond the inputs that are always there."""
        return frozenset()


@dataclass(frozen=True)
class Regularizer(ABC):
    """A term that is added to every token's loss."""

    @abstractmethod
    def term(self, inputs: LossInputs) -> torch.Tensor:
        """[B, T], with gradient; `inputs` are cleaned."""

    def needs(self) -> frozenset[Need]:
        """What `term` reads beyond the inputs that are always there."""
        return frozenset()


@dataclass(frozen=True)
class Objective:
    """A loss with its modifiers and regularizers: what a step calls."""

    loss: Loss
    modifiers: tuple[Modifier, ...] = ()
    regularizers: tuple[Regularizer, ...] = ()

    def needs(self) -> frozenset[Need]:
        """What the step must supply."""
        needs = self.loss.needs()
        for modifier in self.modifiers:
            needs |= modifier.needs()
        for regularizer in self.regularizers:
            needs |= regularizer.needs()
        return needs

    def alternatives(self) -> int:
        """How many other tokens at each place the step must supply."""
        return self.loss.alternatives()

    def rate_scale(self, log_weights: Sequence[float]) -> float:
        """Factor of the step's learning rate, from each completion's Σ (new − behaviour)."""
        scale = 1.0
        for modifier in self.modifiers:
            scale *= modifier.rate_scale(log_weights)
        return scale

    def denominator(self, mask_BT: torch.Tensor, staleness_BT: torch.Tensor) -> float:
        """This batch's share of the step's denominator; sum it over microbatches (and ranks) before `__call__`."""
        taking_part = self._gate(mask_BT, staleness_BT)
        weight_BT = torch.where(taking_part, self._weight(staleness_BT), 0.0)
        if self.loss.aggregation == Aggregation.TOKEN:
            return float(weight_BT.double().sum())
        completions = float((weight_BT.double().sum(dim=1) / taking_part.sum(dim=1).clamp(min=1)).sum())
        constant = self.loss.aggregation == Aggregation.CONSTANT
        return completions * (self.loss.constant_length if constant else 1)

    def __call__(self, inputs: LossInputs, denominator: float | None = None) -> LossOutput:
        """The loss of a microbatch as its share of a step with `denominator` (None: the batch is the whole step)."""
        gated = replace(inputs, mask_BT=self._gate(inputs.mask_BT, inputs.staleness_BT)).cleaned()
        result = self._token_loss(gated)
        loss_BT, kept_BT = result.loss_BT, result.kept_BT & gated.mask_BT
        for modifier in self.modifiers:
            keep_BT = modifier.keep(gated)
            loss_BT, kept_BT = torch.where(keep_BT, loss_BT, 0.0), kept_BT & keep_BT
        for regularizer in self.regularizers:
            loss_BT = loss_BT + regularizer.term(gated)
        loss_BT = torch.where(gated.mask_BT, loss_BT * self._weight(gated.staleness_BT), 0.0)
        if self.loss.aggregation == Aggregation.SEQUENCE:
            loss_BT = loss_BT / gated.mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        if denominator is None:
            denominator = self.denominator(inputs.mask_BT, inputs.staleness_BT)
        # An empty step gives 0 with a gradient of 0, not 0 / 0.
        loss_BT = loss_BT / (denominator if denominator > 0.0 else 1.0)
        return LossOutput(loss_BT.sum(), kept_BT, result.metrics, loss_BT.detach())

    def _token_loss(self, inputs: LossInputs) -> TokenLoss:
        """Raises UserError for losses of another shape, which would be broadcast: a mean would count once per token."""
        result = self.loss.token_loss(inputs)
        wanted = inputs.mask_BT.shape
        for name, values in (("loss_BT", result.loss_BT), ("kept_BT", result.kept_BT)):
            if values.shape != wanted:
                raise UserError(
                    f"{type(self.loss).__name__}.token_loss: {name} must have a value per token, {list(wanted)}, "
                    f"got {list(values.shape)}"
                )
        return result

    def _gate(self, mask_BT: torch.Tensor, staleness_BT: torch.Tensor) -> torch.Tensor:
        mask_BT = self.loss.gate(mask_BT, staleness_BT)
        for modifier in self.modifiers:
            mask_BT = modifier.gate(mask_BT, staleness_BT)
        return mask_BT

    def _weight(self, staleness_BT: torch.Tensor) -> torch.Tensor:
        weight_BT = torch.ones(staleness_BT.shape, device=staleness_BT.device)
        for modifier in self.modifiers:
            weight_BT = weight_BT * modifier.weight(staleness_BT)
        return weight_BT


def surrogate(weight_BT: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """−sg(weight) A new: the policy gradient of A with a weight that has no gradient of its own."""
    return -weight_BT.detach() * inputs.advantage_BT * bounded(inputs.new_BT)


def one_of(owner: str, name: str, value: str, choices: Sequence[str]) -> None:
    """Raise UserError unless `value` is one of the choices."""
    if value not in choices:
        raise UserError(f"{owner}: {name} must be one of {', '.join(choices)}, got {value!r}")


def within(owner: str, name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise UserError unless low ≤ value ≤ high (low < value where `open_low`)."""
    if not (low <= value <= high) or (open_low and value == low):
        raise UserError(f"{owner}: {name} must be in {'(' if open_low else '['}{low}, {high}], got {value}")
