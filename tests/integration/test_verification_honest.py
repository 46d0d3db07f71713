"""What the real engine writes, the verifier accepts: short and long answers, shared prompts, swaps in flight."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from coordinator.verification.checks import Claim, run_checks
from coordinator.verification.resident import ResidentModels, prefill_rollouts
from protocol.rollout import Outcome, RejectionReason, Verdict
from tests.thresholds import BY_HAND
from tests.tiny_model import build_two_versions
from tests.unit.coordinator.verification.claims import generate, generate_all, make_claim, make_request, to_prefill
from worker.engine import Generation, GenerationRequest, Progress, Weights
from worker.vllm_engine.engine import VllmEngine, VllmEngineConfig

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Weights, Weights]:
    return build_two_versions(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def models(versions: tuple[Weights, Weights]) -> ResidentModels:
    folders: dict[str, Path] = {weights.manifest_digest: weights.path for weights in versions}
    return ResidentModels(folders.__getitem__, max_resident=2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(versions: tuple[Weights, Weights]) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(
        VllmEngineConfig(max_num_seqs=8, max_model_len=512, enforce_eager=True, kv_cache_gib=0.25, log_level="ERROR")
    )
    await engine.start(versions[0])
    yield engine
    await engine.close()


def judge(claims: list[Claim], models: ResidentModels) -> list[Verdict]:
    found = prefill_rollouts([to_prefill(claim, key) for key, claim in enumerate(claims)], models)
    return [run_checks(claim, found[key], BY_HAND) for key, claim in enumerate(claims)]


async def test_honest_rollouts_are_accepted(engine: VllmEngine, models: ResidentModels) -> None:
    requests = [make_request(number, group_size=8) for number in range(64)]
    requests += [make_request(100 + number, max_tokens=64, temperature=(1.0, 0.8)[number % 2]) for number in range(24)]
    claims = [make_claim(*pair) for pair in zip(await generate_all(engine, requests), requests, strict=True)]
    for verdict in judge(claims, models):
        assert verdict.outcome is Outcome.ACCEPTED, verdict.detail


async def test_another_seed_is_refused(engine: VllmEngine, models: ResidentModels) -> None:
    leases = [make_request(200 + number) for number in range(8)]
    drawn = [GenerationRequest(f"s{n}", r.prompt_token_ids, r.sampling, r.seed ^ 1) for n, r in enumerate(leases)]
    claims = [make_claim(*pair) for pair in zip(await generate_all(engine, drawn), leases, strict=True)]
    verdicts = judge(claims, models)
    assert {verdict.reason for verdict in verdicts} == {RejectionReason.SEED}


async def test_rollouts_that_met_a_swap_are_accepted(
    engine: VllmEngine, models: ResidentModels, versions: tuple[Weights, Weights]
) -> None:
    requests = [make_request(300 + number, max_tokens=300) for number in range(8)]
    under_way = asyncio.Event()

    async def watch(request: GenerationRequest) -> Generation:
        last: Progress | Generation | None = None
        async for last in engine.generate(request):
            if isinstance(last, Progress) and len(last.token_ids) >= 20:
                under_way.set()
        assert isinstance(last, Generation)
        return last

    running = [asyncio.create_task(watch(request)) for request in requests]
    await asyncio.wait_for(under_way.wait(), timeout=60)
    await engine.swap(versions[1])
    claims = [make_claim(*pair) for pair in zip(await asyncio.gather(*running), requests, strict=True)]
    assert any(len(claim.rollout.spans) == 2 for claim in claims)
    for verdict in judge(claims, models):
        assert verdict.outcome is Outcome.ACCEPTED, verdict.detail
    after = make_request(400)
    claim = make_claim(await generate(engine, after), after)
    assert claim.rollout.spans[0].version == 1 and judge([claim], models)[0].outcome is Outcome.ACCEPTED
