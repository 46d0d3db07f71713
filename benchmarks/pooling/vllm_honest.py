"""Honest rollouts of the engine that workers run: vLLM, with its capture hooks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from benchmarks.pooling.engine import Request
from coordinator.verification.checks import Claim
from protocol.rollout import Rollout, Segment
from worker.calibration import EngineSetting, honest_generations
from worker.engine import Generation, GenerationRequest


def generate(folder: Path, requests: Sequence[Request], shape: tuple[int, int], *, side_by_side: int) -> list[Claim]:
    """A claim for each request. `shape`: vocabulary and hidden size."""
    wanted = [
        GenerationRequest(request.name, request.prompt_token_ids, request.sampling, request.seed)
        for request in requests
    ]
    setting = EngineSetting("honest", max_num_seqs=side_by_side)
    found = asyncio.run(honest_generations(folder, setting, wanted, kv_cache_gib=0.5))
    return [_claim(*pair, shape) for pair in zip(found, requests, strict=True)]


def _claim(found: Generation, request: Request, shape: tuple[int, int]) -> Claim:
    rollout = Rollout(
        run_id="benchmark",
        lease_id="lease",
        sample_id=request.name,
        segments=(Segment.by_model(found.token_ids),),
        logprobs=found.logprobs,
        spans=found.spans,
        proofs=found.proofs,
        stop_reason=found.stop_reason,
    )
    return Claim(rollout, request.prompt_token_ids, request.sampling, request.seed, *shape)
