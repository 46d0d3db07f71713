"""One sampling step, as the hooks of either model runner hand it to the store.

The behaviour log-prob is that of the distribution really sampled from: log_softmax(logits / T) in float32 at the sampled
token, taken from the logits before the sampler sees them (it may change them in place).

Shapes: B rows of the batch, V vocabulary, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from worker.vllm_engine.capture_store import CaptureStore


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of one step. `stored`: those that sample a token of a captured request; `rows[stored]` is where they go."""

    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    rows: NDArray[np.int64]
    stored: NDArray[np.int64]
    scaled_logits_BV: torch.Tensor
    log_normalizer_B: torch.Tensor


def begin_step(
    store: CaptureStore,
    request_ids: list[str],
    positions_B: NDArray[np.int64],
    samples_B: NDArray[np.bool_],
    logits_BV: torch.Tensor,
) -> Step | None:
    """Look at the logits before sampling. None if no row of the batch is of a captured request that samples now."""
    slots = np.where(samples_B, store.slots(request_ids), -1)
    if not (slots >= 0).any():
        return None
    rows = store.rows(slots, positions_B)
    temperatures = torch.from_numpy(np.where(slots >= 0, store.temperatures[slots], np.float32(1.0)))
    scaled = logits_BV.float() / temperatures.to(logits_BV.device, non_blocking=True)[:, None]
    return Step(slots, positions_B, rows, np.flatnonzero(rows >= 0), scaled, scaled.logsumexp(dim=1))


def finish_step(store: CaptureStore, step: Step, hidden_BD: torch.Tensor, tokens_B: torch.Tensor) -> None:
    """Store what led to the sampled tokens."""
    chosen_B = step.scaled_logits_BV.gather(1, tokens_B.reshape(-1, 1).to(torch.int64))[:, 0]
    logprobs_B = chosen_B - step.log_normalizer_B
    if len(step.stored) == len(step.rows):
        store.write(step.rows, hidden_BD, logprobs_B)
    elif len(step.stored):
        picked = torch.from_numpy(step.stored).to(hidden_BD.device, non_blocking=True)
        store.write(step.rows[step.stored], hidden_BD[picked], logprobs_B[picked])


class LogitsTap:
    """Remembers the last input and output of a model's `compute_logits` (the LM head), which both runners call."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.hidden_BD: torch.Tensor | None = None
        self.logits_BV: torch.Tensor | None = None
        self._compute = model.compute_logits
        model.compute_logits = self._tapped

    def _tapped(self, hidden_BD: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor | None:
        logits_BV = self._compute(hidden_BD, *args, **kwargs)
        self.hidden_BD, self.logits_BV = hidden_BD, logits_BV
        return logits_BV

    def take_hidden(self) -> torch.Tensor:
        """The last input of the LM head, once: a step's tensors must not outlive it."""
        assert self.hidden_BD is not None, "the runner sampled without calling compute_logits"
        hidden_BD, self.hidden_BD, self.logits_BV = self.hidden_BD, None, None
        return hidden_BD
