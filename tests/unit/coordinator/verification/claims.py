"""Rollouts to verify: written by an engine, beside what the coordinator's side knows about them."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coordinator.verification.checks import Claim
from coordinator.verification.resident import PrefillRequest
from protocol.rollout import Rollout, SamplingParams, Segment
from protocol.turns import Turns
from tests.tiny_model import EOS_TOKEN_ID, HIDDEN_SIZE, VOCABULARY
from worker.engine import Engine, Generation, GenerationRequest
from worker.turns import segments_of

RUN_ID = "test-run"


def make_request(
    number: int, *, max_tokens: int = 5, temperature: float = 1.0, prompt_tokens: int = 12, group_size: int = 1
) -> GenerationRequest:
    """Request `number`; groups of `group_size` share a prompt, and every request has its own seed."""
    prompt = np.random.default_rng(number // group_size).integers(0, 256, prompt_tokens)
    seed = int(np.random.default_rng(10_000 + number).integers(0, 2**63 - 1))
    sampling = SamplingParams(temperature, max_tokens, (EOS_TOKEN_ID,))
    return GenerationRequest(f"r{number}", tuple(map(int, prompt)), sampling, seed)


async def generate(engine: Engine, request: GenerationRequest) -> Generation:
    """The engine's answer."""
    last: Any = None
    async for event in engine.generate(request):
        last = event
    assert isinstance(last, Generation)
    return last


async def generate_all(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Generation]:
    """All answers, generated at once."""
    return list(await asyncio.gather(*(generate(engine, request) for request in requests)))


def make_claim(generation: Generation, request: GenerationRequest, turns: Turns | None = None) -> Claim:
    """The generation as a worker would submit it under that request's lease."""
    rollout = Rollout(
        run_id=RUN_ID,
        lease_id="lease",
        sample_id=request.request_id,
        segments=segments_of(generation, request.sampling, turns),
        logprobs=generation.logprobs,
        spans=generation.spans,
        proofs=generation.proofs,
        stop_reason=generation.stop_reason,
        turns="" if turns is None else turns.rules.digest,
    )
    return Claim(rollout, request.prompt_token_ids, request.sampling, request.seed, VOCABULARY, HIDDEN_SIZE, turns)


def alter(claim: Claim, **fields: Any) -> Claim:
    """The same claim with other fields of its rollout."""
    return replace(claim, rollout=replace(claim.rollout, **fields))


def with_tokens(claim: Claim, token_ids: Sequence[int]) -> Claim:
    """The same claim with other tokens, all by the model."""
    return alter(claim, segments=(Segment.by_model(tuple(token_ids)),))


def to_prefill(claim: Claim, key: Hashable = 0) -> PrefillRequest:
    """What to prefill for this claim."""
    rollout = claim.rollout
    return PrefillRequest(
        key, claim.prompt_token_ids, rollout.token_ids, claim.seed, claim.sampling.temperature, rollout.spans
    )
