"""Low-rank adapters: the matrices stay as they are, and W + (α/r) B A is what computes. Published versions hold the sum.

Source: LoRA (Hu et al. 2021). B starts at 0, so version 0 is the initial policy exactly. Only linear layers inside the
backbone are adapted; embeddings, norms and head neither are nor train.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from protocol.errors import UserError
from trainer.sharding import whole

_OWN = ("lora_a", "lora_b")


class LoraLinear(nn.Linear):
    """A linear layer that was given an adapter in place, so that its weight keeps its name."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: float

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + self.lora_scale * (input @ self.lora_a.T @ self.lora_b.T)


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
    """W + (α/r) B A, computed in float32, in the weight's own precision."""
    return (weight.float() + scale * (up.float() @ down.float())).to(weight.dtype)


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
