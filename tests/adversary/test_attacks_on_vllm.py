"""Cheats where the engine matters, as switches of one real vLLM process, judged by the verifier's own checks."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from coordinator.verification.resident import ResidentModels
from protocol.rollout import Outcome, RejectionReason, Verdict
from tests.adversary.attacks import Attack, Cheat, CheatingEngine, make_cheat
from tests.adversary.attacks.prefilled import Prefilled
from tests.adversary.judging import judge, make_requests, reasons, separation, values
from tests.unit.coordinator.verification.claims import generate
from worker.engine import Generation, GenerationRequest, Weights
from worker.vllm_engine.engine import VllmEngine, VllmEngineConfig

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

PROOF, LOGPROB, SEED, TERMINATION = (
    RejectionReason.PROOF,
    RejectionReason.LOGPROB,
    RejectionReason.SEED,
    RejectionReason.TERMINATION,
)
EXPECTED = {
    Attack.OTHER_MODEL: {PROOF},
    Attack.RANDOM_INIT: {PROOF},
    Attack.OTHER_WEIGHTS: {PROOF},
    Attack.NOISE_3: {PROOF},
    Attack.INT4: {PROOF},
    Attack.STALE_WEIGHTS: {PROOF},
    Attack.SMALL_MODEL: {SEED},
    Attack.HIDDEN_PROMPT: {PROOF},
    Attack.OTHER_PROMPT: {PROOF},
    Attack.OTHER_TEMPERATURE: {LOGPROB, SEED},
    Attack.WRONG_SEED: {SEED},
    Attack.RANDOM_TOKENS: {PROOF, TERMINATION},
    Attack.EDITED_TOKEN: {PROOF, LOGPROB, SEED},
    Attack.TRUNCATED: {PROOF, TERMINATION},
    Attack.REPLAY: {PROOF},
    Attack.LYING_SPANS: {PROOF},
}
PREFILLED = (Attack.HIDDEN_PROMPT, Attack.OTHER_TEMPERATURE, Attack.WRONG_SEED)
SHOWN_BY = {
    Attack.NOISE_1: ("proof_mantissa_mean", "logprob_gap_median"),
    Attack.INT6: ("proof_mantissa_mean", "logprob_gap_median"),
    Attack.INT8: ("proof_mantissa_mean", "logprob_gap_median"),
}
FEW, MANY = 12, 72
STANDARD_ERRORS = 5.0


@dataclasses.dataclass
class _Bench:
    """The engine, two versions, and the trusted models it is judged by."""

    engine: CheatingEngine
    older: Weights
    published: Weights
    models: ResidentModels
    requests: list[GenerationRequest]

    async def write(self, cheat: Cheat, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Switch the cheat on, publish both versions, and generate."""
        self.engine.cheat = cheat
        await self.engine.swap(self.older)
        await self.engine.swap(self.published)
        return list(await asyncio.gather(*(generate(self.engine, request) for request in requests)))

    async def verdicts(self, cheat: Cheat, samples: int = FEW) -> list[Verdict]:
        """What the verifier finds of that many samples."""
        requests = self.requests[:samples]
        generations = await self.write(cheat, requests)
        return await asyncio.to_thread(judge, generations, requests, self.models)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(older: Weights, published: Weights, models: ResidentModels) -> AsyncIterator[_Bench]:
    config = VllmEngineConfig(max_num_seqs=16, max_model_len=128, enforce_eager=True, kv_cache_gib=0.25)
    engine = CheatingEngine(VllmEngine(config), Cheat())
    await engine.start(older)
    try:
        bench = _Bench(engine, older, published, models, make_requests(MANY, first=7000))
        # Where the honest answer is a lone EOS there is nothing to cut, to edit or to split: those are no one's to cheat at.
        written = await bench.write(Cheat(), bench.requests[: 2 * FEW])
        few = [r for r, g in zip(bench.requests, written, strict=False) if len(g.token_ids) >= 8]
        bench.requests = [*few, *bench.requests[2 * FEW :]]
        assert len(few) >= FEW
        yield bench
    finally:
        await engine.close()


async def test_honest_generations_are_all_accepted(bench: _Bench) -> None:
    verdicts = await bench.verdicts(Cheat(), 2 * FEW)
    assert [verdict.detail for verdict in verdicts if verdict.outcome is not Outcome.ACCEPTED] == []
    assert all(len(verdict.old_logprobs) > 0 for verdict in verdicts)


@pytest.mark.parametrize("attack", EXPECTED)
async def test_a_cheat_is_never_accepted_and_the_reason_fits(bench: _Bench, attack: Attack) -> None:
    verdicts = await bench.verdicts(make_cheat(attack))
    if attack is Attack.REPLAY:  # the first of them is honest
        verdicts = [verdict for verdict in verdicts if verdict.outcome is not Outcome.ACCEPTED]
        assert len(verdicts) >= FEW - 1
    assert reasons(verdicts) <= EXPECTED[attack], [verdict.metrics for verdict in verdicts]


@pytest.mark.parametrize("attack", PREFILLED)
async def test_flawless_proofs_do_not_help(bench: _Bench, attack: Attack) -> None:
    assert reasons(await bench.verdicts(Prefilled(make_cheat(attack)))) == {SEED}


async def test_the_same_engine_is_honest_again_when_it_stops_cheating(bench: _Bench) -> None:
    assert reasons(await bench.verdicts(Cheat())) == {None}


@pytest.mark.full
async def test_what_passes_one_by_one_is_above_honest_by_the_mean(bench: _Bench) -> None:
    honest = await bench.verdicts(Cheat(), MANY)
    for attack, metrics in SHOWN_BY.items():
        verdicts = await bench.verdicts(make_cheat(attack), MANY)
        for metric in metrics:
            found = separation(values(verdicts, metric), values(honest, metric))
            assert found > STANDARD_ERRORS, (attack, metric, found)
