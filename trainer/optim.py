"""AdamW or Muon on float32 masters, a warm-up, gradient clipping, and a guard that skips and counts a bad step."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch

from protocol.errors import UserError
from trainer.muon import Muon
from trainer.precision import as_published
from trainer.sharding import divided_like, own_part, whole


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """`warmup_steps`: optimizer steps over which the rate grows linearly from lr / warmup_steps; then constant.

    `kind`: `adamw`, or `muon`: matrices of the hidden layers by Muon (orthogonalized momentum, scaled so that its updates
    are as large as AdamW's and `lr` means the same; Jordan et al. 2024, Moonlight 2025), the others by AdamW.
    `max_grad_norm`: gradients are scaled down to this norm. A norm above `skip_grad_norm` skips the step instead, as a
    gradient that is not finite does.
    """

    kind: str = "adamw"
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    skip_grad_norm: float = math.inf

    def __post_init__(self) -> None:
        if self.kind not in ("adamw", "muon"):
            raise UserError(f"optimizer: kind must be adamw or muon, got {self.kind!r}")
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
    """AdamW over a model's parameters, and Muon over `matrices` among them where the settings say so.

    Each parameter has a float32 master, which is updated; the parameter itself, of whatever dtype, is what a version holds
    of it (`trainer.precision`). At small rates an update is less than half a unit in the last place of bfloat16 and would be
    lost without.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        settings: OptimizerSettings,
        matrices: Iterable[torch.nn.Parameter] = (),
    ) -> None:
        self.settings = settings
        self.counters = Counters()
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._masters = [torch.nn.Parameter(each.detach().to(torch.float32, copy=True)) for each in self._parameters]
        self._round()
        by_muon = {id(matrix) for matrix in matrices} if settings.kind == "muon" else set()
        pairs = list(zip(self._masters, self._parameters, strict=True))
        self._muon = _muon([master for master, parameter in pairs if id(parameter) in by_muon], settings)
        self._adamw = torch.optim.AdamW(
            [master for master, parameter in pairs if id(parameter) not in by_muon],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            foreach=False if any(map(_is_divided, self._masters)) else None,  # it can't mix divided and whole ones
        )

    def step(self, rate_scale: float = 1.0) -> StepReport:
        """Apply the accumulated gradients and clear them, or skip if they are not finite or explode.

        `rate_scale`: factor of this step's learning rate.
        """
        rate = learning_rate(self.settings, self.counters.steps) * rate_scale
        self._collect()
        gradients = [master.grad for master in self._masters if master.grad is not None]
        norm = _norm(gradients)
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
        """Everything that `load_state_dict` needs to go on exactly."""
        own = [master.detach() for master in self._masters]
        counters = {field.name: getattr(self.counters, field.name) for field in fields(Counters)}
        muon = {} if self._muon is None else {"muon": self._muon.state_dict()}
        return {"adamw": self._adamw.state_dict(), "masters": own, "counters": counters, **muon}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`, sharing nothing with it, once the model has its weights: what an earlier release saved in
        float32 has no masters of its own. Raises ValueError if it is of another model.
        """
        state = copy.deepcopy(state)
        if len(state["masters"]) != len(self._masters):
            raise ValueError(f"optimizer state of {len(state['masters'])} parameters for {len(self._masters)}")
        if ("muon" in state) != (self._muon is not None):
            raise ValueError("optimizer state of another kind of optimizer")
        self._adamw.load_state_dict(_divided(state["adamw"], self._adamw))
        if self._muon is not None:
            self._muon.load_state_dict(_divided(state["muon"], self._muon))
        self.counters = Counters(**state["counters"])
        for saved, master, parameter in zip(state["masters"], self._masters, self._parameters, strict=True):
            if saved is not None:
                master.data.copy_(divided_like(saved, master))
            else:
                own_part(master.data).copy_(own_part(parameter.detach()))
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            own_part(parameter).copy_(as_published(own_part(master)))

    def _collect(self) -> None:
        """Move the gradients to the masters."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if parameter.grad is not None:
                master.grad = parameter.grad.float()
                parameter.grad = None

    def _apply(self, rate: float, norm: float) -> None:
        if norm > self.settings.max_grad_norm:
            gradients = [master.grad for master in self._masters if master.grad is not None]
            for gradient in gradients:
                gradient.mul_(self.settings.max_grad_norm / (norm + 1e-6))
        for optimizer in (self._adamw, self._muon):
            if optimizer is None:
                continue
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        self._round()


def _is_divided(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def _norm(gradients: list[torch.Tensor]) -> float:
    """The norm of all gradients together, over all processes."""
    total = 0.0
    for chosen in (True, False):
        part = [gradient for gradient in gradients if _is_divided(gradient) is chosen]
        if part:
            total = math.hypot(total, float(whole(torch.nn.utils.get_total_norm(part))))
    return total


def _divided(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Whole moments divided as the parameters are, where those are divided."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = {
        number: {
            name: divided_like(value, parameters[number]) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }
        for number, values in state["state"].items()
    }
    return {**state, "state": moments}


def hidden_matrices(model: Any) -> list[torch.nn.Parameter]:
    """Weights of the linear layers inside the backbone: what Muon is for. Embeddings and head are AdamW's."""
    return [
        module.weight
        for module in model.base_model.modules()
        if isinstance(module, torch.nn.Linear) and module.weight.requires_grad
    ]


def _muon(matrices: list[torch.nn.Parameter], settings: OptimizerSettings) -> Muon | None:
    if not matrices:
        return None
    return Muon(matrices, lr=settings.lr, weight_decay=settings.weight_decay)
