"""Each cheat as a switch of one real vLLM engine, judged by the verifier's own checks: none is accepted, honest all are."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from coordinator.verification.checks import Claim, run_checks
from coordinator.verification.resident import PrefillRequest, ResidentModels, prefill_rollouts
from coordinator.verification.thresholds import DEFAULTS
from protocol.rollout import Outcome, RejectionReason, Rollout, SamplingParams, Segment, Verdict
from tests.adversary.attacks import Attack, CheatingEngine
from tests.tiny_model import EOS_TOKEN_ID, HIDDEN_SIZE, VOCABULARY, build_tiny_model
from worker.engine import Generation, GenerationRequest, Weights
from worker.vllm_engine.engine import VllmEngine, VllmEngineConfig

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

_SAMPLES = 24
_SAMPLING = SamplingParams(1.0, 40, (EOS_TOKEN_ID,))
_EXPECTED = {
    Attack.RANDOM_TOKENS: {RejectionReason.TERMINATION, RejectionReason.PROOF, RejectionReason.LOGPROB},
    Attack.OTHER_WEIGHTS: {RejectionReason.PROOF},
    Attack.WRONG_SEED: {RejectionReason.SEED},
    Attack.EDITED_TOKEN: {
        RejectionReason.TERMINATION,
        RejectionReason.PROOF,
        RejectionReason.LOGPROB,
        RejectionReason.SEED,
    },
}


@dataclasses.dataclass
class _Bench:
    """The engine, and the trusted models it is judged by."""

    engine: CheatingEngine
    folder: Path
    models: ResidentModels
    versions: int = 0

    def weights(self) -> Weights:
        """The same weights as the next version: what a swap loads."""
        self.versions += 1
        return Weights(self.versions, f"sha256:{self.versions:064x}", self.folder)

    async def verdicts(self, attack: Attack) -> list[Verdict]:
        """Generate under the attack and judge."""
        self.engine.attack = attack
        await self.engine.swap(self.weights())
        requests = [
            GenerationRequest(f"{attack}-{i}", tuple(range(40 + i % 7, 60 + i % 7)), _SAMPLING, 7_000 + i)
            for i in range(_SAMPLES)
        ]
        generations = await asyncio.gather(*(self._generate(request) for request in requests))
        return await asyncio.to_thread(self._judge, requests, generations)

    async def _generate(self, request: GenerationRequest) -> Generation:
        events = [event async for event in self.engine.generate(request)]
        assert isinstance(events[-1], Generation)
        return events[-1]

    def _judge(self, requests: list[GenerationRequest], generations: list[Generation]) -> list[Verdict]:
        claims = {
            request.request_id: Claim(
                _rollout(generation), request.prompt_token_ids, _SAMPLING, request.seed, VOCABULARY, HIDDEN_SIZE
            )
            for request, generation in zip(requests, generations, strict=True)
        }
        measured = prefill_rollouts(
            [
                PrefillRequest(
                    key, claim.prompt_token_ids, claim.rollout.token_ids, claim.seed, 1.0, claim.rollout.spans
                )
                for key, claim in claims.items()
            ],
            self.models,
        )
        return [run_checks(claim, measured[key], DEFAULTS) for key, claim in claims.items()]


def _rollout(generation: Generation) -> Rollout:
    return Rollout(
        "run",
        "lease",
        "sample",
        (Segment.by_model(generation.token_ids),),
        generation.logprobs,
        generation.spans,
        generation.proofs,
        generation.stop_reason,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[_Bench]:
    folder = build_tiny_model(tmp_path_factory.mktemp("attacks") / "model")
    config = VllmEngineConfig(max_num_seqs=8, max_model_len=128, enforce_eager=True, kv_cache_gib=0.25)
    engine = CheatingEngine(VllmEngine(config), Attack.HONEST)
    bench = _Bench(engine, folder, ResidentModels(lambda digest: folder, max_resident=1))
    await engine.start(Weights(0, f"sha256:{0:064x}", folder))
    try:
        yield bench
    finally:
        await engine.close()


async def test_honest_generations_are_all_accepted(bench: _Bench) -> None:
    verdicts = await bench.verdicts(Attack.HONEST)
    assert [verdict.detail for verdict in verdicts if verdict.outcome is not Outcome.ACCEPTED] == []
    assert all(len(verdict.old_logprobs) > 0 for verdict in verdicts)


@pytest.mark.parametrize("attack", list(_EXPECTED))
async def test_a_cheat_is_never_accepted_and_the_reason_fits(bench: _Bench, attack: Attack) -> None:
    verdicts = await bench.verdicts(attack)
    assert [verdict.metrics for verdict in verdicts if verdict.outcome is not Outcome.REJECTED] == []
    assert {verdict.reason for verdict in verdicts} <= _EXPECTED[attack]


async def test_the_same_engine_is_honest_again_when_it_stops_cheating(bench: _Bench) -> None:
    verdicts = await bench.verdicts(Attack.HONEST)
    assert all(verdict.outcome is Outcome.ACCEPTED for verdict in verdicts)
