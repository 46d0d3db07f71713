"""The seeded choice for the V1 model runner, whose own sampler draws other noise than the protocol's.

Requests go to vLLM with temperature 0. Just before the sampler, each of their rows is replaced by one whose largest logit
is the token that the seed selects, and the greedy sampler takes it. Working on the runner's batch rather than as a logits
processor, the position comes from the same array as the captured rows': it stays right under preemption, chunked prefill
and async scheduling, where a processor sees placeholders for tokens not yet known.
"""

from __future__ import annotations

import numpy as np
import torch

from protocol import gumbel
from worker.vllm_engine.capture_step import Step
from worker.vllm_engine.capture_store import CaptureStore


def force_seeded_choice(store: CaptureStore, step: Step, logits_BV: torch.Tensor) -> torch.Tensor:
    """Logits whose argmax is the protocol's choice in every row of a captured request that samples; others as given."""
    rows = np.flatnonzero(step.slots >= 0)
    picked = torch.from_numpy(rows).to(logits_BV.device)
    scaled = step.scaled_logits_BV if len(rows) == len(step.slots) else step.scaled_logits_BV[picked]
    # Already divided by each row's temperature, hence 1 here.
    winners = gumbel.select_batch(scaled.cpu().numpy(), store.seeds[step.slots[rows]], step.positions[rows], 1.0)
    forced = logits_BV.clone()
    forced[picked] = float("-inf")
    forced[picked, torch.from_numpy(winners).to(logits_BV.device)] = 0.0
    return forced
