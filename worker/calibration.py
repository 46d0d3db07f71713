"""Honest rollouts of this machine's engine under many settings, for `coordinator calibrate`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from protocol.declaration import BF16
from worker.engine import Generation, GenerationRequest, generation_of, outside_a_run
from worker.hardware import default_kv_cache_gib
from worker.vllm_engine.engine import VllmEngine, VllmEngineConfig


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """One way in which an honest worker may run vLLM. `share`: of the rollouts asked for, since some ways are slow."""

    name: str
    max_num_seqs: int = 16
    dtype: str = "bfloat16"
    prefix_caching: bool = True
    max_num_batched_tokens: int | None = None
    eager: bool = True
    share: float = 1.0
    precision: str = BF16


def engine_settings(dtype: str, *, compiled: bool, precision: str = BF16) -> tuple[EngineSetting, ...]:
    """What is varied: batch size 1 to 64, prefix caching, chunked prefill, dtype and, if asked for, compilation.

    `precision`: the class that all of them compute in; only bf16 has another dtype, in which the same weights round less.
    """
    other = "float32" if dtype == "bfloat16" else "bfloat16"
    settings: tuple[EngineSetting, ...] = (
        EngineSetting("16 at once", dtype=dtype),
        EngineSetting("one at a time", max_num_seqs=1, dtype=dtype, share=0.25),
        EngineSetting("64 at once", max_num_seqs=64, dtype=dtype),
        EngineSetting("no prefix cache", dtype=dtype, prefix_caching=False),
        EngineSetting("chunked prefill", dtype=dtype, max_num_seqs=8, max_num_batched_tokens=16),
    )
    if precision == BF16:
        settings = (*settings, EngineSetting(f"{other}, 16 at once", dtype=other))
    if compiled:
        settings = (*settings, EngineSetting("compiled", dtype=dtype, eager=False))
    return tuple(replace(setting, precision=precision) for setting in settings)


async def honest_generations(
    folder: Path, setting: EngineSetting, requests: Sequence[GenerationRequest], *, kv_cache_gib: float | None
) -> list[Generation]:
    """Start an engine in that setting, let it answer all requests, and stop it. Raises OurFault as the engine does.

    `kv_cache_gib`: None for what suits this machine.
    """
    longest = max(len(request.prompt_token_ids) + request.sampling.max_tokens for request in requests)
    engine = VllmEngine(
        VllmEngineConfig(
            max_num_seqs=setting.max_num_seqs,
            max_model_len=longest,
            dtype=setting.dtype,
            enforce_eager=setting.eager,
            kv_cache_gib=default_kv_cache_gib() if kv_cache_gib is None else kv_cache_gib,
            enable_prefix_caching=setting.prefix_caching,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            log_level="ERROR",
            precision=setting.precision,
        )
    )
    await engine.start(outside_a_run(folder))
    try:
        return list(await asyncio.gather(*(generation_of(engine, request) for request in requests)))
    finally:
        await engine.close()
