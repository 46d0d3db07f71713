"""Muon: momentum whose direction is orthogonalized, for the matrices of the hidden layers.

    m ← β m + (1 − β) g      d = β m + (1 − β) g  (Nesterov)      W ← (1 − ηλ) W − η · 0.2 √max(A, B) · O(d)

O(d) ≈ U Vᵀ of d = U S Vᵀ, by five quintic Newton-Schulz iterations in bfloat16. The factor makes an update as large as
AdamW's, so that one rate fits both. Sources: Jordan et al. 2024 (the method, its coefficients), Moonlight 2025 (the scale).

A matrix that is divided among processes has its momentum divided alike; the direction is put together, orthogonalized on
every process and cut again, so that any number of processes takes the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from trainer.sharding import divided_like, put_together

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_RMS_OF_ADAMW = 0.2
_LEAST_NORM = 1e-7


class Muon(torch.optim.Optimizer):
    """Over matrices alone. `lr` and `weight_decay` mean what they mean for AdamW."""

    def __init__(
        self, matrices: Iterable[torch.nn.Parameter], *, lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step on the gradients there are; all processes must have them for the same matrices."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._update(matrix, group)

    def _update(self, matrix: torch.nn.Parameter, group: dict[str, Any]) -> None:
        state, beta = self.state[matrix], group["momentum"]
        assert matrix.grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        momentum = state["momentum_buffer"]
        momentum.mul_(beta).add_(matrix.grad, alpha=1.0 - beta)
        direction = put_together(matrix.grad * (1.0 - beta) + momentum * beta)
        rate = group["lr"] * _RMS_OF_ADAMW * math.sqrt(max(direction.shape))
        update = orthogonalized(direction).to(matrix.dtype)
        matrix.mul_(1.0 - group["lr"] * group["weight_decay"])
        matrix.add_(divided_like(update, matrix), alpha=-rate)


def orthogonalized(direction_AB: torch.Tensor) -> torch.Tensor:
    """[A, B] of singular values near 1 (between about 0.7 and 1.2) and the same singular vectors, in bfloat16."""
    a, b, c = _COEFFICIENTS
    tall = direction_AB.shape[0] > direction_AB.shape[1]
    x = direction_AB.bfloat16()
    x = x.T if tall else x
    x = x / x.norm().clamp(min=_LEAST_NORM)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
