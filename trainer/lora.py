"""Low-rank adapters: the matrices stay as they are, and W + (α/r) B A, rounded as it is published, is what computes.

Source: LoRA (Hu et al. 2021). B starts at 0, so version 0 is the initial policy exactly. Only linear layers inside the
backbone are adapted; embeddings, norms and head neither are nor train. The usual two products, x Wᵀ + (α/r) x Aᵀ Bᵀ, would
train another policy than the one that samples: most of what an adapter changes is less than half of bfloat16's spacing. The
sum costs what r more tokens would.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from protocol.errors import UserError
from trainer.precision import as_published
from trainer.sharding import whole

_OWN = ("lora_a", "lora_b")


class LoraLinear(nn.Linear):
    """A linear layer that was given an adapter in place, so that its weight keeps its name."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: float

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _Adapted.apply(input, self.weight, self.lora_a, self.lora_b, self.lora_scale)
        return product if self.bias is None else product + self.bias


class _Adapted(torch.autograd.Function):
    """x merged(W, A, B)ᵀ, with gradients for x, A and B as if nothing were rounded. The sum is made anew for the way back
    rather than kept: kept ones would be the whole model once more.
    """

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight, down, up)
        ctx.scale = scale
        return input @ merged(weight, down, up, scale).T

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, down, up = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        of_input = gradient @ merged(weight, down, up, ctx.scale) if wanted[0] else None
        rows_NO, rows_NI = gradient.flatten(0, -2), input.flatten(0, -2)
        of_down = ctx.scale * ((rows_NO @ up).T @ rows_NI) if wanted[2] else None
        of_up = ctx.scale * (rows_NO.T @ (rows_NI @ down.T)) if wanted[3] else None
        return of_input, None, of_down, of_up, None


def adapt(model: Any, rank: int, alpha: float) -> int:
    """Give every linear layer of the backbone an adapter and freeze the rest; how many parameters train now.

    Raises UserError for a rank that exceeds a matrix.
    """
    model.requires_grad_(False)
    layers = [module for module in model.base_model.modules() if type(module) is nn.Linear]
    for layer in layers:
        if rank > min(layer.weight.shape):
            raise UserError(f"trainer.lora_rank: {rank} exceeds a matrix of {tuple(layer.weight.shape)}")
        out_features, in_features = layer.weight.shape
        layer.__class__ = LoraLinear
        layer.lora_scale = alpha / rank  # type: ignore[assignment]
        down = torch.empty(rank, in_features, dtype=layer.weight.dtype, device=layer.weight.device)
        nn.init.kaiming_uniform_(down, a=math.sqrt(5))
        layer.lora_a = nn.Parameter(down)
        layer.lora_b = nn.Parameter(down.new_zeros(out_features, rank))
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def merged(weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float) -> torch.Tensor:
    """W + (α/r) B A, computed in float32 and rounded as it is published, in the weight's own dtype."""
    return as_published(weight.float() + scale * (up.float() @ down.float())).to(weight.dtype)


class Merged:
    """A model as it would be without adapters, put together, for whatever asks for its state or its head only."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        """By the names of the plain model."""
        parts = whole(self._model.state_dict())
        state = {name: value for name, value in parts.items() if name.split(".")[-1] not in _OWN}
        with torch.no_grad():
            for name, module in self._model.named_modules():
                if isinstance(module, LoraLinear):
                    weight, down, up = (parts[f"{name}.{part}"] for part in ("weight", "lora_a", "lora_b"))
                    state[f"{name}.weight"] = merged(weight, down, up, module.lora_scale)
        return state

    def get_output_embeddings(self) -> Any:
        return self._model.get_output_embeddings()
