"""A critic for the advantages that need one: a value head on the policy's hidden states, with an optimizer of its own.

The head reads the state from which a token is predicted, that is before the token is taken. It sends no gradient into the
policy, so it costs a fraction of a forward pass; a critic with a backbone of its own would cost a second model.

N tokens, D hidden size.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from protocol.errors import OurFault

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

    def fit(self, hidden_ND: torch.Tensor, target_N: torch.Tensor) -> dict[str, float]:
        """Regress on the targets. Raises OurFault if they are not finite; nothing has changed then."""
        if not bool(torch.isfinite(target_N).all()):
            raise OurFault("the critic's targets are not finite: look at the rewards")
        features_ND, before_N = _normal(hidden_ND), self.values(hidden_ND)
        for _ in range(self._updates):
            loss = (self._head(features_ND).squeeze(-1) - target_N).square().mean()
            self._optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self._head.parameters(), 1.0)
            self._optimizer.step()
        error = float((target_N - before_N).square().mean())
        spread = float(target_N.var(correction=0))
        return {"critic_error": error, "critic_explained": 1.0 - error / spread if spread > 0.0 else 0.0}

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs to go on exactly; a copy, since training changes tensors in place."""
        return copy.deepcopy({"head": self._head.state_dict(), "optimizer": self._optimizer.state_dict()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self._head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))


def _normal(hidden_ND: torch.Tensor) -> torch.Tensor:
    """Of unit scale, so that one learning rate fits any model."""
    return nn.functional.layer_norm(hidden_ND.float(), hidden_ND.shape[-1:])
