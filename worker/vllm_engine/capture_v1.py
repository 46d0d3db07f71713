"""Hooks of vLLM's V1 model runner (the CPU build's and older GPU builds').

The runner computes logits in `execute_model` (one row per request, in the order of `input_batch.req_ids`) and samples in
`_sample`. A row samples unless `discard_request_mask` says that its prefill is not done; its position is that of the last
token scheduled for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from worker.vllm_engine.capture_step import LogitsTap, begin_step, finish_step
from worker.vllm_engine.capture_store import CaptureStore
from worker.vllm_engine.noise_v1 import force_seeded_choice


def install(runner: Any, store: CaptureStore) -> None:
    """Capture every sampled row of `runner` and make the seeded choice in the sampler's place."""
    tap = LogitsTap(runner.get_model())
    sample = runner._sample

    def captured_sample(logits: Any, spec_decode_metadata: Any) -> Any:
        if logits is None or spec_decode_metadata is not None:
            return sample(logits, spec_decode_metadata)
        batch = runner.input_batch
        count = batch.num_reqs
        # Copies: the runner reuses both buffers for the next step.
        positions = runner.optimistic_seq_lens_cpu[:count].numpy().astype(np.int64) - 1
        samples = ~runner.discard_request_mask.np[:count]
        step = begin_step(store, batch.req_ids[:count], positions, samples, logits[:count])
        if step is None:
            return sample(logits, spec_decode_metadata)
        hidden = tap.take_hidden()[:count]
        output = sample(force_seeded_choice(store, step, logits), spec_decode_metadata)
        finish_step(store, step, hidden, output.sampled_token_ids[:count, 0])
        return output

    runner._sample = captured_sample
