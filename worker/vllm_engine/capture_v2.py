"""Hooks of vLLM's V2 model runner, the default on GPUs.

`sample(hidden_states, input_batch, grammar_output)` computes the logits (one row per request, in the order of
`input_batch.req_ids`) and samples, natively with the protocol's noise for requests that carry a `seed`. A row samples once
its sequence reaches the prefill length. Lengths are read from the host's copies, so the device is never waited for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from worker.vllm_engine.capture_step import Step, begin_step, finish_step
from worker.vllm_engine.capture_store import CaptureStore


def install(runner: Any, store: CaptureStore) -> None:
    """Capture every sampled row of `runner`."""
    model = runner.get_model()
    compute_logits, sample = model.compute_logits, runner.sample
    current: list[Any] = []  # the batch being sampled, while it is
    seen: list[tuple[Step, torch.Tensor]] = []

    def captured_logits(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        logits = compute_logits(hidden, *args, **kwargs)
        if current and logits is not None:
            step = _begin(store, current[0], logits)
            if step is not None:
                seen.append((step, hidden))
        return logits

    def captured_sample(hidden_states: torch.Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        current[:], seen[:] = [input_batch], []
        try:
            output = sample(hidden_states, input_batch, *args, **kwargs)
            for step, hidden in seen:
                finish_step(store, step, hidden, output[0].sampled_token_ids[: len(step.rows), 0])
        finally:
            current.clear()
            seen.clear()
        return output

    model.compute_logits = captured_logits
    runner.sample = captured_sample


def _begin(store: CaptureStore, batch: Any, logits: torch.Tensor) -> Step | None:
    count = batch.num_reqs
    lengths = batch.seq_lens_cpu_upper_bound[:count].numpy().astype(np.int64)  # exact without speculative decoding
    samples = lengths >= batch.prefill_len_np[:count]
    return begin_step(store, list(batch.req_ids[:count]), lengths - 1, samples, logits[:count])
