"""AdamW on float32 master weights, a warm-up, gradient clipping, and a guard that skips a bad step and counts it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch

from protocol.errors import UserError


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """`warmup_steps`: optimizer steps over which the rate grows linearly from lr / warmup_steps; then constant.

    `max_grad_norm`: gradients are scaled down to this norm. A norm above `skip_grad_norm` skips the step instead, as a
    gradient that is not finite does.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    skip_grad_norm: float = math.inf

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "max_grad_norm", "skip_grad_norm"):
            if not getattr(self, name) > 0.0:
                raise UserError(f"optimizer: {name} must be above 0, got {getattr(self, name)}")
        if self.weight_decay < 0.0 or self.warmup_steps < 0:
            raise UserError("optimizer: weight_decay and warmup_steps must be at least 0")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise UserError(f"optimizer: betas must be in [0, 1), got {self.betas}")


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a call of `Optimizer.step` did. `grad_norm` is the norm before clipping; `applied` is False if skipped."""

    applied: bool
    grad_norm: float
    lr: float


@dataclass
class Counters:
    """`steps` were applied, `skipped` were not, `skipped_in_a_row` of them since the last one applied."""

    steps: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """The rate of optimizer step `step` (from 0)."""
    if step >= settings.warmup_steps:
        return settings.lr
    return settings.lr * (step + 1) / settings.warmup_steps


class Optimizer:
    """AdamW over a model's parameters.

    A parameter of lower precision has a float32 master that is updated and copied back, since at small rates an update
    is less than half a unit in the last place of bfloat16 and would be lost. A float32 parameter is its own master.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], settings: OptimizerSettings) -> None:
        self.settings = settings
        self.counters = Counters()
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._masters = [_master(parameter) for parameter in self._parameters]
        self._adamw = torch.optim.AdamW(
            self._masters,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )

    def step(self) -> StepReport:
        """Apply the accumulated gradients and clear them, or skip if they are not finite or explode."""
        rate = learning_rate(self.settings, self.counters.steps)
        self._collect()
        gradients = [master.grad for master in self._masters if master.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        applied = math.isfinite(norm) and norm <= self.settings.skip_grad_norm
        if applied:
            self._apply(rate, norm)
            self.counters.steps += 1
            self.counters.skipped_in_a_row = 0
        else:
            self.counters.skipped += 1
            self.counters.skipped_in_a_row += 1
        self.zero_grad()
        return StepReport(applied, norm, rate)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for tensor in (*self._parameters, *self._masters):
            tensor.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs to go on exactly; float32 parameters are the model's to save."""
        own = [None if m is p else m.detach() for m, p in zip(self._masters, self._parameters, strict=True)]
        counters = {field.name: getattr(self.counters, field.name) for field in fields(Counters)}
        return {"adamw": self._adamw.state_dict(), "masters": own, "counters": counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`. Raises ValueError if it is of another model."""
        if len(state["masters"]) != len(self._masters):
            raise ValueError(f"optimizer state of {len(state['masters'])} parameters for {len(self._masters)}")
        self._adamw.load_state_dict(state["adamw"])
        self.counters = Counters(**state["counters"])
        for saved, master in zip(state["masters"], self._masters, strict=True):
            if saved is not None:
                master.data.copy_(saved)

    def _collect(self) -> None:
        """Move gradients of lower precision to their masters."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float()
                parameter.grad = None

    def _apply(self, rate: float, norm: float) -> None:
        torch.nn.utils.clip_grads_with_norm_(self._masters, self.settings.max_grad_norm, torch.tensor(norm))
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)


def _master(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    if parameter.dtype == torch.float32:
        return parameter
    return torch.nn.Parameter(parameter.detach().float().clone())
