"""Completions of given prompts by an engine, outside of any run: for `trainer evaluate --engine`.

Each sample has a seed of its own, derived from its place, so what is drawn doesn't hang on how many are made at once.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from protocol.rollout import SamplingParams
from worker.engine import Engine, Generation, GenerationRequest, generation_of, outside_a_run
from worker.hardware import default_kv_cache_gib, native_dtype
from worker.vllm_engine.installed import require_vllm

_SEED_BITS = 63


class EngineSampler:
    """Starts the engine that `make` gives for a longest sequence (tokens, prompt included)."""

    def __init__(self, make: Callable[[int], Engine]) -> None:
        self._make = make
        self._engine: Engine | None = None
        self._count = 0

    async def start(self, model: Path, longest: int) -> None:
        """Load a policy folder. Raises OurFault with the engine's own words if that fails."""
        self._engine = self._make(longest)
        await self._engine.start(outside_a_run(model))

    async def complete(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        temperature: float,
        max_tokens: int,
        eos_token_ids: Sequence[int],
        seed: int,
        samples: int,
    ) -> list[list[list[int]]]:
        """For each prompt `samples` completions as token ids, the ending EOS included if one came."""
        sampling = SamplingParams(temperature, max_tokens, tuple(eos_token_ids))
        return [
            [list(generation.token_ids) for generation in each]
            for each in await asyncio.gather(
                *(self._samples(prompt, sampling, seed, place, samples) for place, prompt in enumerate(prompts))
            )
        ]

    async def close(self) -> None:
        """Stop the engine. Safe to call twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    async def _samples(
        self, prompt: Sequence[int], sampling: SamplingParams, seed: int, place: int, samples: int
    ) -> list[Generation]:
        seeds = (sample_seed(seed, place, number) for number in range(samples))
        return list(await asyncio.gather(*(self._one(tuple(prompt), sampling, each) for each in seeds)))

    async def _one(self, prompt: tuple[int, ...], sampling: SamplingParams, seed: int) -> Generation:
        assert self._engine is not None, "start comes first"
        self._count += 1
        request = GenerationRequest(f"completion-{self._count}", prompt, sampling, seed)
        return await generation_of(self._engine, request)


def sample_seed(seed: int, place: int, number: int) -> int:
    """63 bits that differ for every prompt's place and sample's number."""
    digest = hashlib.sha256(f"{seed}/{place}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS)


def engine_sampler(name: str, concurrency: int) -> EngineSampler:
    """A sampler on the engine of that name, in this machine's own precision. Raises UserError if it isn't installed."""
    if name == "reference":
        from worker.reference_engine import ReferenceEngine

        return EngineSampler(lambda longest: ReferenceEngine(native_dtype()))
    require_vllm()
    return EngineSampler(lambda longest: _vllm(longest, concurrency))


def _vllm(longest: int, concurrency: int) -> Engine:
    from worker.vllm_engine.engine import VllmEngine, VllmEngineConfig

    return VllmEngine(
        VllmEngineConfig(
            max_num_seqs=concurrency,
            max_model_len=longest,
            dtype=native_dtype(),
            enforce_eager=True,
            kv_cache_gib=default_kv_cache_gib(),
            log_level="ERROR",
        )
    )
