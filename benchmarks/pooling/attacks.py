"""What a worker may compute with instead of the published weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Attack = Callable[[nn.Module], None]


def noise(share: float) -> Attack:
    """Every matrix w ← w · (1 + share · N(0, 1))."""

    def apply(model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(0)
        for weight in _matrices(model):
            weight.mul_(1 + share * torch.randn(weight.shape, generator=generator))
            weight.copy_(weight.bfloat16())

    return apply


def quantized(bits: int) -> Attack:
    """Symmetric rounding to that many bits, one scale per output channel."""

    def apply(model: nn.Module) -> None:
        largest = 2 ** (bits - 1) - 1
        for weight in _matrices(model):
            scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / largest
            weight.copy_((weight / scale).round().clamp(-largest, largest) * scale)

    return apply


def fp8_cache(model: nn.Module) -> None:
    """Keys and values rounded to fp8 (e4m3) before they are kept."""

    def rounded(_module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output.to(torch.float8_e4m3fn).to(output.dtype)

    for name, layer in model.named_modules():
        if name.endswith(("k_proj", "v_proj")):
            layer.register_forward_hook(rounded)


ATTACKS: dict[str, Attack] = {
    "noise 1 %": noise(0.01),
    "noise 3 %": noise(0.03),
    "int8": quantized(8),
    "int6": quantized(6),
    "int4": quantized(4),
    "fp8 KV cache": fp8_cache,
}


def _matrices(model: nn.Module) -> list[torch.Tensor]:
    return [layer.weight.data for layer in model.modules() if isinstance(layer, nn.Linear)]
