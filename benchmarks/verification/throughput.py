"""Generation with proofs and seeded sampling beside plain vLLM: same model, same requests, same engine options.

Both engines are loaded; they work alternately, never at once. Plain vLLM samples at temperature 1 by its own sampler.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.tables import bootstrap_median
from protocol.rollout import SamplingParams
from worker.engine import Generation, GenerationRequest, Weights
from worker.vllm_engine.engine import VllmEngine, VllmEngineConfig

_DIGEST = "sha256:" + "0" * 64


@dataclass(frozen=True, slots=True)
class Load:
    """`requests` of `tokens` tokens each after a prompt of `prompt` tokens, `concurrency` at once, `repeats` pairs."""

    requests: int = 16
    tokens: int = 64
    prompt: int = 32
    concurrency: int = 16
    repeats: int = 7


async def measure(folder: Path, dtype: str, load: Load) -> dict[str, Any]:
    """Tokens per second of both, and the median of the paired ratios with its 95 % bootstrap interval."""
    config = VllmEngineConfig(
        max_num_seqs=load.concurrency,
        max_model_len=load.prompt + load.tokens,
        dtype=dtype,
        enforce_eager=True,
        kv_cache_gib=0.5,
        log_level="ERROR",
    )
    ours = VllmEngine(config)
    await ours.start(Weights(0, _DIGEST, folder))
    plain = plain_engine(folder, config)
    try:
        pairs = await _alternate(ours, plain, load)
    finally:
        await close_plain(plain)
        await ours.close()
    ratios = [mine / theirs for mine, theirs in pairs]
    low, high = bootstrap_median(ratios)
    return {
        "requests": load.requests,
        "tokens_each": load.tokens,
        "concurrency": load.concurrency,
        "pairs": load.repeats,
        "ours_tokens_per_s": median(mine for mine, _ in pairs),
        "plain_tokens_per_s": median(theirs for _, theirs in pairs),
        "ratio": median(ratios),
        "ratio_ci95": [low, high],
    }


async def _alternate(ours: VllmEngine, plain: Any, load: Load) -> list[tuple[float, float]]:
    pairs: list[tuple[float, float]] = []
    for number in range(load.repeats + 1):
        prompts = _prompts(load, number)
        run_ours, run_plain = _ours(ours, number, load), _plain(plain, number, load)
        if number % 2:
            theirs, mine = await _rate(run_plain, prompts, load), await _rate(run_ours, prompts, load)
        else:
            mine, theirs = await _rate(run_ours, prompts, load), await _rate(run_plain, prompts, load)
        if number:  # the first pair warms both up
            pairs.append((mine, theirs))
            print(f"pair {number}: {mine:.0f} and {theirs:.0f} tokens/s, {mine / theirs:.3f}", flush=True)
    return pairs


async def _rate(run: Callable[[int, tuple[int, ...]], Awaitable[int]], prompts: list[Any], load: Load) -> float:
    slots = asyncio.Semaphore(load.concurrency)

    async def one(index: int, prompt: tuple[int, ...]) -> int:
        async with slots:
            return await run(index, prompt)

    begun = time.perf_counter()
    tokens = sum(await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts))))
    return tokens / (time.perf_counter() - begun)


def _prompts(load: Load, number: int) -> list[tuple[int, ...]]:
    draw = random.Random(number)
    return [tuple(draw.randrange(1000, 40_000) for _ in range(load.prompt)) for _ in range(load.requests)]


def _ours(engine: VllmEngine, number: int, load: Load) -> Callable[[int, tuple[int, ...]], Awaitable[int]]:
    async def run(index: int, prompt: tuple[int, ...]) -> int:
        sampling = SamplingParams(1.0, load.tokens, ())
        request = GenerationRequest(f"{number}-{index}", prompt, sampling, (number << 20) + index)
        tokens = 0
        async for event in engine.generate(request):
            if isinstance(event, Generation):
                tokens = len(event.token_ids)
                assert len(event.proofs[0]) == -(-tokens // 32), "a proof for every 32 tokens"
        return tokens

    return run


def _plain(engine: Any, number: int, load: Load) -> Callable[[int, tuple[int, ...]], Awaitable[int]]:
    from vllm.inputs.engine import tokens_input

    parameters = plain_parameters(load.tokens)

    async def run(index: int, prompt: tuple[int, ...]) -> int:
        tokens = 0
        async for output in engine.generate(tokens_input(list(prompt)), parameters, f"p{number}-{index}"):
            tokens += len(output.outputs[0].token_ids)
        return tokens

    return run


def plain_parameters(tokens: int) -> Any:
    """vLLM's own sampling of exactly so many tokens."""
    from vllm import SamplingParams as Plain
    from vllm.sampling_params import RequestOutputKind

    return Plain(
        temperature=1.0,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


async def close_plain(engine: Any) -> None:
    """Stop it and its processes."""
    engine.output_handler.cancel()
    await asyncio.to_thread(engine.shutdown)


def plain_engine(folder: Path, config: VllmEngineConfig) -> Any:
    """vLLM without any of our hooks, in the same settings."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    assert config.kv_cache_gib is not None
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            load_format="safetensors",
            hf_overrides={"tie_word_embeddings": False},
            generation_config="vllm",
            dtype=config.dtype,
            enforce_eager=config.enforce_eager,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
            kv_cache_memory_bytes=int(config.kv_cache_gib * (1 << 30)),
            disable_log_stats=True,
        )
    )
