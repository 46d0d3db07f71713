"""Generate with the V2 model runner and write what came out as JSON: `generate.py MODEL OTHER_MODEL OUTPUT`.

Run with this folder and the repository in PYTHONPATH, TRITON_INTERPRET=1 and VLLM_USE_V2_MODEL_RUNNER=1.
"""

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path

from protocol.rollout import SamplingParams
from worker.engine import Generation, GenerationRequest, Weights
from worker.vllm_engine.engine import VllmEngine, VllmEngineConfig

REQUESTS = 4
TOKENS = 40
TEMPERATURE = 0.7
SEED = 2**62 + 100


def request(number: int) -> GenerationRequest:
    prompt = tuple(range(10, 60)) + tuple(range(100, 103 + 7 * number))
    return GenerationRequest(f"v2-{number}", prompt, SamplingParams(TEMPERATURE, TOKENS, ()), SEED + number)


async def generate(engine: VllmEngine, number: int, enough: asyncio.Event) -> Generation:
    last = None
    async for last in engine.generate(request(number)):
        if not isinstance(last, Generation) and len(last.token_ids) >= TOKENS // 2:
            enough.set()
    assert isinstance(last, Generation)
    return last


async def abort(engine: VllmEngine) -> None:
    stream = engine.generate(request(REQUESTS))
    await anext(stream)
    await stream.aclose()


async def main(model: Path, other: Path) -> str:
    """The result as JSON."""
    engine = VllmEngine(
        VllmEngineConfig(
            max_num_seqs=REQUESTS + 1,
            max_model_len=256,
            enforce_eager=True,
            kv_cache_gib=0.01,
            max_num_batched_tokens=48,
            log_level="ERROR",
        )
    )
    await engine.start(Weights(0, "sha256:0", model))
    enough = asyncio.Event()
    running = [asyncio.create_task(generate(engine, number, enough)) for number in range(REQUESTS)]
    await abort(engine)
    await enough.wait()
    await engine.swap(Weights(1, "sha256:1", other))
    generations = await asyncio.gather(*running)
    result = {
        "runner": engine.runner,
        "usage": await engine.capture_usage(),
        "generations": [
            {**asdict(generation), "proofs": [[proof.hex() for proof in span] for span in generation.proofs]}
            for generation in generations
        ],
    }
    await engine.close()
    return json.dumps(result)


if __name__ == "__main__":
    first, second, output = (Path(argument) for argument in sys.argv[1:4])
    output.write_text(asyncio.run(main(first, second)))
