"""Honest rollouts of the engine that workers run: vLLM, with its capture hooks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from benchmarks.pooling.engine import DIGEST, Request
from coordinator.verification.checks import Claim
from protocol.rollout import Rollout, Segment
from worker.engine import Generation, GenerationRequest, Weights
from worker.vllm_engine.engine import VllmEngine, VllmEngineConfig


def generate(folder: Path, requests: Sequence[Request], shape: tuple[int, int], *, side_by_side: int) -> list[Claim]:
    """A claim for each request. `shape`: vocabulary and hidden size."""
    return asyncio.run(_generate(folder, requests, shape, side_by_side))


async def _generate(
    folder: Path, requests: Sequence[Request], shape: tuple[int, int], side_by_side: int
) -> list[Claim]:
    engine = VllmEngine(
        VllmEngineConfig(max_num_seqs=side_by_side, max_model_len=512, enforce_eager=True, kv_cache_gib=0.5)
    )
    await engine.start(Weights(0, DIGEST, folder))
    try:
        found = await asyncio.gather(*(_one(engine, request) for request in requests))
    finally:
        await engine.close()
    return [_claim(*pair, shape) for pair in zip(found, requests, strict=True)]


async def _one(engine: VllmEngine, request: Request) -> Generation:
    wanted = GenerationRequest(request.name, request.prompt_token_ids, request.sampling, request.seed)
    events = [event async for event in engine.generate(wanted)]
    assert isinstance(events[-1], Generation), "the last is the whole"
    return events[-1]


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
