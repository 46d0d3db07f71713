"""A critic for the advantages that need one: a value head on the policy's hidden states, with an optimizer of its own.

The head reads the state from which a token is predicted, that is before the token is taken. It sends no gradient into the
policy, so it costs a fraction of a forward pass; a critic with a backbone of its own would cost a second model. On several
processes each holds the whole head, and all take the same steps.

N tokens, D hidden size.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn

from protocol.errors import OurFault
from trainer.sharding import average_gradients
from trainer.team import Team

_WIDTH = 64


class Critic:
    """`learning_rate`: of its own AdamW. `updates`: full-batch steps of it per step of the policy (SAO: 2)."""

    def __init__(self, hidden_size: int, *, learning_rate: float, updates: int, device: str = "cpu") -> None:
        with torch.random.fork_rng():  # a critic must not change what else a seed gives
            torch.manual_seed(0)
            self._head = nn.Sequential(nn.Linear(hidden_size, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, 1)).to(device)
        # Starts at 0: the first advantages are then the rewards themselves.
        nn.init.zeros_(self._head[-1].weight)
        nn.init.zeros_(self._head[-1].bias)
        self._optimizer = torch.optim.AdamW(self._head.parameters(), lr=learning_rate, weight_decay=0.0)
        self._updates = updates

    @torch.no_grad()
    def values(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """[N] values."""
        return self._head(_normal(hidden_ND)).squeeze(-1)

    def fit(self, hidden_ND: torch.Tensor, target_N: torch.Tensor, team: Team | None = None) -> dict[str, float]:
        """Regress on the targets of all processes; each brings its own, maybe none.

        Raises OurFault, on all of them, if a target is not finite; nothing has changed then.
        """
        team = team or Team()
        features_ND, before_N = _normal(hidden_ND), self.values(hidden_ND)
        sums = [sum(parts) for parts in zip(*team.gather(_sums(target_N, before_N)), strict=True)]
        if not math.isfinite(sums[1]):
            raise OurFault("the critic's targets are not finite: look at the rewards")
        for _ in range(self._updates):
            # Gradients are averaged over the processes, and the sum is wanted.
            loss = (self._head(features_ND).squeeze(-1) - target_N).square().sum() / sums[0] * team.size
            self._optimizer.zero_grad()
            loss.backward()
            if team.size > 1:
                average_gradients(list(self._head.parameters()), team.size)
            nn.utils.clip_grad_norm_(self._head.parameters(), 1.0)
            self._optimizer.step()
        mean, square, error = (each / sums[0] for each in sums[1:])
        spread = square - mean * mean
        return {"critic_error": error, "critic_explained": 1.0 - error / spread if spread > 0.0 else 0.0}

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs to go on exactly; a copy, since training changes tensors in place."""
        return copy.deepcopy({"head": self._head.state_dict(), "optimizer": self._optimizer.state_dict()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self._head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))


def _sums(target_N: torch.Tensor, before_N: torch.Tensor) -> tuple[float, float, float, float]:
    """How many, Σ target, Σ target², Σ error²."""
    target_N, before_N = target_N.double(), before_N.double()
    error = (target_N - before_N).square().sum()
    return float(len(target_N)), float(target_N.sum()), float(target_N.square().sum()), float(error)


def _normal(hidden_ND: torch.Tensor) -> torch.Tensor:
    """Of unit scale, so that one learning rate fits any model."""
    return nn.functional.layer_norm(hidden_ND.float(), hidden_ND.shape[-1:])
