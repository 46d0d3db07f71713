"""The real vLLM engine (V1 runner on a CPU build) against what a transformers prefill finds.

One engine serves the whole module. It is kept short of memory on purpose: prompts are prefilled in chunks of 64 tokens
and the cache holds fewer tokens than the batch needs, so that requests are preempted and recomputed.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio

from coordinator.verification.checks import run_checks
from coordinator.verification.resident import ResidentModels, prefill_rollouts
from protocol.errors import OurFault, UserError
from protocol.rollout import Outcome, SamplingParams, StopReason
from tests.integration.prefill_check import assert_honest, examine
from tests.thresholds import BY_HAND
from tests.tiny_model import build_tiny_model, build_two_versions
from tests.turns import make_turns
from tests.unit.coordinator.verification.claims import make_claim, to_prefill
from worker.engine import Generation, GenerationRequest, SwapReport, Weights
from worker.turns import generate_turns
from worker.vllm_engine.engine import VllmEngine, VllmEngineConfig

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

SEED = 2**62 + 1
# A token takes 512 bytes (2 layers, keys and values, 2 heads, 32 numbers, 2 bytes): this holds some 1,000 tokens.
KV_CACHE_GIB = 1024 * 512 / (1 << 30)


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Weights, Weights]:
    return build_two_versions(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def others() -> set[int]:
    """Children of this process that are no engine's: those there were before one started."""
    return {each.pid for each in psutil.Process().children(recursive=True)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_engine(versions: tuple[Weights, Weights], others: set[int]) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(
        VllmEngineConfig(
            max_num_seqs=8,
            max_model_len=512,
            enforce_eager=True,
            kv_cache_gib=KV_CACHE_GIB,
            max_num_batched_tokens=64,
            log_level="ERROR",
        )
    )
    await engine.start(versions[0])
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared_engine: VllmEngine, versions: tuple[Weights, Weights]) -> VllmEngine:
    """The engine with version 0 loaded and nothing in flight."""
    await shared_engine.swap(versions[0])
    assert await shared_engine.capture_usage() == (0, 0)
    return shared_engine


def request(
    name: str,
    *,
    prompt: int = 20,
    tokens: int = 80,
    temperature: float = 1.0,
    seed: int = SEED,
    eos: tuple[int, ...] = (),
) -> GenerationRequest:
    prompt_ids = tuple(np.random.default_rng(prompt).integers(0, 256, prompt).tolist())
    return GenerationRequest(name, prompt_ids, SamplingParams(temperature, tokens, eos), seed)


async def finish(engine: VllmEngine, wanted: GenerationRequest) -> Generation:
    last = None
    async for last in engine.generate(wanted):
        assert isinstance(last, Generation) or len(last.token_ids) <= wanted.sampling.max_tokens
    assert isinstance(last, Generation)
    return last


async def finish_all(engine: VllmEngine, wanted: list[GenerationRequest]) -> list[Generation]:
    return await asyncio.gather(*(finish(engine, each) for each in wanted))


@pytest.mark.parametrize("temperature", [0.7, 1.3])
async def test_a_prefill_confirms_proofs_logprobs_and_seeds(
    engine: VllmEngine, versions: tuple[Weights, Weights], temperature: float
) -> None:
    wanted = [
        request(f"t{n}-{temperature}", prompt=5 + 3 * n, temperature=temperature, seed=SEED + n) for n in range(6)
    ]
    generations = await finish_all(engine, wanted)
    for generation in generations:
        assert generation.stop_reason is StopReason.LENGTH
        assert [(span.version, span.start, span.end) for span in generation.spans] == [(0, 0, 80)]
        assert generation.spans[0].manifest_digest == versions[0].manifest_digest
        assert [len(span) for span in generation.proofs] == [3]
    pairs = list(zip(generations, wanted, strict=True))
    assert_honest([examine(generation, each, 0, versions[0]) for generation, each in pairs])
    wrong = [examine(generation, each, 0, versions[1]) for generation, each in pairs]
    assert min(number for found in wrong for number in found.mismatches) > 60


async def test_rows_stay_aligned_under_chunked_prefill_prefix_caching_and_preemption(
    engine: VllmEngine, versions: tuple[Weights, Weights]
) -> None:
    """Eight requests of 130 + 150 tokens need twice the cache; their prompts share 128 tokens and take three chunks."""
    shared = request("shared", prompt=128).prompt_token_ids
    wanted = [
        GenerationRequest(f"p{n}", (*shared, n, 200 + n), SamplingParams(1.0, 150, ()), SEED + n // 2) for n in range(8)
    ]
    generations = await finish_all(engine, wanted)
    assert all(len(generation.token_ids) == 150 for generation in generations)
    assert_honest(
        [examine(generation, each, 0, versions[0]) for generation, each in zip(generations, wanted, strict=True)]
    )


async def test_the_seed_decides_the_tokens(engine: VllmEngine) -> None:
    alone = await finish(engine, request("alone", tokens=24))
    twin, other, *_ = await finish_all(
        engine,
        [
            request("twin", tokens=24),
            request("other", tokens=24, seed=SEED + 1),
            *(request(f"noise{n}", prompt=40 + n, tokens=30) for n in range(3)),
        ],
    )
    agreeing = sum(a == b for a, b in zip(alone.token_ids, twin.token_ids, strict=True))
    assert agreeing >= 12  # equal until a near-tie falls the other way, if it does
    assert other.token_ids != alone.token_ids


async def test_only_the_pinned_eos_ids_end_a_generation(engine: VllmEngine) -> None:
    free = await finish(engine, request("free", tokens=40))
    eos = free.token_ids[20]
    first = free.token_ids.index(eos)
    ended = await finish(engine, request("ended", tokens=40, eos=(eos,)))
    assert ended.stop_reason is StopReason.EOS
    assert ended.token_ids == free.token_ids[: first + 1]
    assert len(ended.logprobs) == first + 1
    assert ended.spans[0].end == first + 1


async def test_closing_the_iterator_aborts_and_frees_its_rows(engine: VllmEngine) -> None:
    streams = [engine.generate(request(f"abort{n}", prompt=30 + n, tokens=300)) for n in range(3)]
    for stream in streams:
        await anext(stream)
    assert (await engine.capture_usage())[0] == 3
    for stream in streams:
        await stream.aclose()
    assert await engine.capture_usage() == (0, 0)
    assert len((await finish(engine, request("after", tokens=5))).token_ids) == 5


async def swap_when(engine: VllmEngine, streams: list[AsyncIterator], tokens: int, weights: Weights) -> SwapReport:
    """Swap once each stream has at least that many tokens."""
    for stream in streams:
        async for progress in stream:
            if len(progress.token_ids) >= tokens:
                break
    return await engine.swap(weights)


async def test_a_swap_in_flight_gives_spans_that_verify_under_their_own_version(
    engine: VllmEngine, versions: tuple[Weights, Weights]
) -> None:
    wanted = [request(f"s{n}", prompt=10 + n, tokens=200, seed=SEED + n) for n in range(4)]
    streams = [engine.generate(each) for each in wanted]
    report = await swap_when(engine, streams, 40, versions[1])
    assert (report.version, report.requests_in_flight) == (1, 4)
    assert report.prefix_tokens_recomputed >= 4 * 40
    generations = [[event async for event in stream][-1] for stream in streams]
    for generation, each in zip(generations, wanted, strict=True):
        assert isinstance(generation, Generation)
        assert [span.version for span in generation.spans] == [0, 1]
        assert [span.manifest_digest for span in generation.spans] == [weights.manifest_digest for weights in versions]
        assert generation.spans[0].end == generation.spans[1].start >= 40
        findings = [examine(generation, each, number, versions[number]) for number in (0, 1)]
        assert_honest(findings)
        assert findings[0].margins[-1] < 0.5  # the border is exact on both sides
        assert findings[1].margins[0] < 0.5
        swapped = examine(generation, each, 1, versions[0])
        assert min(swapped.mismatches) > 60


async def test_after_a_swap_the_new_models_head_is_in_use(
    engine: VllmEngine, versions: tuple[Weights, Weights]
) -> None:
    """vLLM's CPU build keeps a tied model's old head after a reload: hidden states would be new and log-probs wrong."""
    await engine.swap(versions[1])
    wanted = request("head", tokens=60)
    generation = await finish(engine, wanted)
    assert [span.version for span in generation.spans] == [1]
    assert_honest([examine(generation, wanted, 0, versions[1])])


async def test_unusable_weights_are_refused_and_the_old_ones_stay(
    engine: VllmEngine, versions: tuple[Weights, Weights], tmp_path: Path
) -> None:
    broken = build_tiny_model(tmp_path / "broken")
    whole = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OurFault, match="fetch"):
        await engine.swap(Weights(7, "sha256:7", broken))
    generation = await finish(engine, request("kept", tokens=10))
    assert [span.version for span in generation.spans] == [0]


async def test_requests_that_cannot_be_served_are_the_users_mistake(engine: VllmEngine) -> None:
    with pytest.raises(UserError, match="max_model_len"):
        await finish(engine, request("long", prompt=20, tokens=500))
    with pytest.raises(UserError, match="temperature"):
        await finish(engine, request("cold", temperature=0.001))


async def test_turns_are_what_a_verifier_accepts_also_when_weights_are_swapped_within_them(
    engine: VllmEngine, versions: tuple[Weights, Weights]
) -> None:
    """The prefix of a later turn comes from the cache or is computed again: nothing of it is captured, and nothing needs be."""
    turns = make_turns(tuple(range(33, 60)), max_calls=4)
    wanted = [request(f"turns{n}", prompt=10 + n, tokens=120, seed=SEED + n, eos=(256,)) for n in range(6)]
    told = [0] * len(wanted)
    halfway = asyncio.Event()

    async def write(number: int) -> Generation:
        last = None
        async for last in generate_turns(engine, wanted[number], turns):
            told[number] = len(last.token_ids)
            if sum(told) > 240:
                halfway.set()
        assert isinstance(last, Generation)
        return last

    async def swap() -> SwapReport:
        await halfway.wait()
        return await engine.swap(versions[1])

    *generations, report = await asyncio.gather(*(write(number) for number in range(len(wanted))), swap())
    assert isinstance(report, SwapReport) and report.requests_in_flight > 0
    models = ResidentModels({each.manifest_digest: each.path for each in versions}.__getitem__, max_resident=2)
    claims = [make_claim(made, each, turns) for made, each in zip(generations, wanted, strict=True)]
    found = prefill_rollouts([to_prefill(claim, number) for number, claim in enumerate(claims)], models)
    verdicts = [run_checks(claim, found[number], BY_HAND) for number, claim in enumerate(claims)]
    assert [verdict.outcome for verdict in verdicts] == [Outcome.ACCEPTED] * len(wanted), verdicts
    assert sum(len(claim.rollout.segments) for claim in claims) > 3 * len(claims), "calls were answered"
    assert any(len(claim.rollout.spans) == 2 for claim in claims), "weights were swapped under way"
    assert await engine.capture_usage() == (0, 0)


async def test_a_dead_engine_is_our_fault(engine: VllmEngine, others: set[int]) -> None:
    """Last in this module: it kills the engine's processes. (Python's own tracker is left alone.)"""
    stream = engine.generate(request("doomed", tokens=400))
    await anext(stream)
    for child in psutil.Process().children(recursive=True):
        if child.pid not in others and "resource_tracker" not in " ".join(child.cmdline()):
            child.kill()
    with pytest.raises(OurFault, match="generation failed"):
        async for _ in stream:
            pass
    with pytest.raises(OurFault):
        await finish(engine, request("late", tokens=5))
