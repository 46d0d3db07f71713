"""vLLM's own pace, to set the verifier's beside: plain generation, no proofs, no seeds.

A long completion is not generated to its end: its pace is taken at several places of it, each by requests whose prompt is
as long as the sequence is there (and the same for all: vLLM's prefix cache then spares this measurement their prefills), from
when all have their first token until the first one is done.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

from benchmarks.verification.throughput import close_plain, plain_engine, plain_parameters
from worker.vllm_engine.engine import VllmEngineConfig

PROMPT = 32
_PLACES = 3
_STEPS = 8  # tokens per place


def measure(folder: Path, dtype: str, *, lengths: tuple[int, ...], concurrency: tuple[int, ...]) -> dict[str, float]:
    """Tokens per second by "length x concurrency"."""
    return asyncio.run(_measure(folder, dtype, lengths, concurrency))


async def _measure(
    folder: Path, dtype: str, lengths: tuple[int, ...], concurrency: tuple[int, ...]
) -> dict[str, float]:
    config = VllmEngineConfig(
        max_num_seqs=max(concurrency),
        max_model_len=PROMPT + max(lengths) + _STEPS,
        dtype=dtype,
        enforce_eager=True,
        kv_cache_gib=4.0,
        log_level="ERROR",
    )
    engine = plain_engine(folder, config)
    try:
        await _pace(engine, 0, PROMPT, 8, 4)  # warm up
        found: dict[str, float] = {}
        for length in lengths:
            steps = min(_STEPS, length)
            places = range(0, length - steps + 1, max(1, (length - steps) // (_PLACES - 1)))
            for at_once in concurrency:
                paces = [await _pace(engine, length, PROMPT + place, steps, at_once) for place in places]
                found[f"{length} x {at_once}"] = harmonic_mean(paces)
        return found
    finally:
        await close_plain(engine)


async def _pace(engine: Any, number: int, prompt_tokens: int, steps: int, at_once: int) -> float:
    """Tokens per second while all requests decode; where some are done before others begin, over the whole of it."""
    draw = random.Random(number * 10_007 + prompt_tokens)
    prompt = [draw.randrange(1000, 40_000) for _ in range(prompt_tokens)]
    name = f"{number}-{prompt_tokens}-{at_once}"
    await _arrivals(engine, prompt, 1, f"{name}-first")
    arrived = await asyncio.gather(*(_arrivals(engine, prompt, steps, f"{name}-{n}") for n in range(at_once)))
    begun, ended = [each[0][0] for each in arrived], [each[-1][0] for each in arrived]
    first, last = max(begun), min(ended)
    if last <= first:
        first, last = min(begun), max(ended)
    return sum(count for each in arrived for at, count in each if first < at <= last) / (last - first)


async def _arrivals(engine: Any, prompt: list[int], steps: int, name: str) -> list[tuple[float, int]]:
    """When tokens of one request came, and how many."""
    from vllm.inputs.engine import tokens_input

    stream = engine.generate(tokens_input(prompt), plain_parameters(steps), name)
    return [(time.perf_counter(), len(output.outputs[0].token_ids)) async for output in stream]
