"""The reference engine is right by its own definition: seeds, log-probs, spans and proofs, also across a swap."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from protocol import gumbel, toploc
from protocol.errors import OurFault, UserError
from protocol.rollout import SamplingParams, StopReason
from tests.tiny_model import build_two_versions
from worker.engine import Generation, GenerationRequest, Progress, SwapFailed, Weights
from worker.reference_engine import ReferenceEngine

PROMPT = tuple(range(40, 60))
SEED = 2**62 + 7


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Weights, Weights]:
    return build_two_versions(tmp_path_factory.mktemp("models"))


@pytest.fixture
async def engine(versions: tuple[Weights, Weights]) -> AsyncIterator[ReferenceEngine]:
    engine = ReferenceEngine()
    await engine.start(versions[0])
    yield engine
    await engine.close()


def request(request_id: str = "r", *, tokens: int = 40, temperature: float = 0.8, eos: tuple[int, ...] = ()):
    return GenerationRequest(request_id, PROMPT, SamplingParams(temperature, tokens, eos), SEED)


async def finish(engine: ReferenceEngine, wanted: GenerationRequest) -> Generation:
    events = [event async for event in engine.generate(wanted)]
    assert all(isinstance(event, Progress) for event in events[:-1])
    assert isinstance(events[-1], Generation)
    return events[-1]


def prefill(weights: Weights, generation: Generation) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits behind each token, from one pass over the whole sequence."""
    model = AutoModelForCausalLM.from_pretrained(weights.path, dtype=torch.bfloat16).eval()
    tokens = torch.tensor([[*PROMPT, *generation.token_ids][:-1]])
    with torch.inference_mode():
        hidden = model.model(tokens).last_hidden_state[0, len(PROMPT) - 1 :]
        return hidden, model.lm_head(hidden).float()


def check_span(weights: Weights, generation: Generation, number: int, temperature: float) -> None:
    """The span's proofs, log-probs and choices are those of `weights`, up to bf16 noise."""
    span = generation.spans[number]
    hidden, logits = (tensor[span.start : span.end] for tensor in prefill(weights, generation))
    tokens = np.array(generation.token_ids[span.start : span.end])
    bits = hidden.view(torch.int16).numpy().view(np.uint16)
    assert len(generation.proofs[number]) == span.proof_count
    for chunk, proof in enumerate(generation.proofs[number]):
        rows = bits[chunk * toploc.CHUNK_TOKENS :][: toploc.CHUNK_TOKENS]
        assert toploc.compare(proof, rows).exponent_mismatches <= 8
    expected = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()
    assert np.abs(expected - np.array(generation.logprobs[span.start : span.end])).mean() < 0.05
    first = len(PROMPT) - 1 + span.start
    margins = gumbel.margins(
        logits.numpy(), seed=SEED, first_position=first, token_ids_T=tokens, temperature=temperature
    )
    assert margins.mean() < 0.02


async def test_generation_is_what_a_prefill_verifies(engine: ReferenceEngine, versions: tuple[Weights, Weights]):
    generation = await finish(engine, request())
    assert generation.stop_reason is StopReason.LENGTH
    assert [(span.version, span.start, span.end) for span in generation.spans] == [(0, 0, 40)]
    assert generation.spans[0].manifest_digest == versions[0].manifest_digest
    check_span(versions[0], generation, 0, 0.8)


async def test_the_same_seed_gives_the_same_tokens_beside_others(engine: ReferenceEngine) -> None:
    alone = await finish(engine, request("alone", tokens=12))
    twin, _ = await asyncio.gather(
        finish(engine, request("twin", tokens=12)), finish(engine, request("other", tokens=5))
    )
    assert twin.token_ids == alone.token_ids


async def test_eos_ends_and_is_part_of_the_generation(engine: ReferenceEngine) -> None:
    free = await finish(engine, request("free", tokens=20))
    eos = free.token_ids[9]
    ended = await finish(engine, request("ended", tokens=20, eos=(eos,)))
    assert ended.stop_reason is StopReason.EOS
    assert ended.token_ids == free.token_ids[: free.token_ids.index(eos) + 1]


async def test_a_swap_in_flight_starts_a_span_of_the_new_weights(
    engine: ReferenceEngine, versions: tuple[Weights, Weights]
) -> None:
    stream = engine.generate(request(tokens=50))
    for _ in range(20):
        await anext(stream)
    report = await engine.swap(versions[1])
    assert (report.version, report.requests_in_flight, report.prefix_tokens_recomputed) == (1, 1, len(PROMPT) + 20)
    generation = [event async for event in stream][-1]
    assert isinstance(generation, Generation)
    assert [(span.version, span.start, span.end) for span in generation.spans] == [(0, 0, 20), (1, 20, 50)]
    for number, weights in enumerate(versions):
        check_span(weights, generation, number, 0.8)


async def test_closing_the_iterator_forgets_the_request(
    engine: ReferenceEngine, versions: tuple[Weights, Weights]
) -> None:
    stream = engine.generate(request())
    await anext(stream)
    await stream.aclose()
    assert (await engine.swap(versions[1])).requests_in_flight == 0


async def test_an_unloadable_version_leaves_the_old_one(engine: ReferenceEngine, tmp_path: Path) -> None:
    with pytest.raises(SwapFailed, match="version 5"):
        await engine.swap(Weights(5, "sha256:5", tmp_path / "nowhere"))
    assert (await finish(engine, request(tokens=2))).spans[0].version == 0


async def test_misuse_is_named(engine: ReferenceEngine) -> None:
    with pytest.raises(UserError, match="no tokens"):
        await anext(engine.generate(GenerationRequest("r", (), SamplingParams(1.0, 1, ()), 1)))
    await engine.close()
    with pytest.raises(OurFault, match="not started"):
        await finish(engine, request())
