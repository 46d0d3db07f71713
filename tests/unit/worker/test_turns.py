"""Several turns upon the reference engine: positions, spans and proofs count on, also across a swap."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.verification.checks import run_checks
from coordinator.verification.resident import ResidentModels, prefill_rollouts
from environments.turns import turns_of
from protocol.errors import OurFault, UserError
from protocol.rollout import Author, Outcome, SamplingParams, StopReason, VersionSpan
from protocol.tokenizer import RunTokenizer
from protocol.turns import Turns
from tests.factories import make_terms
from tests.thresholds import BY_HAND
from tests.tiny_model import EOS_TOKEN_ID, build_two_versions
from tests.turns import CALLS, CallingParity, backwards, decode, encode, make_turns
from tests.unit.coordinator.verification.claims import make_claim, make_request, to_prefill
from worker.engine import Generation, GenerationRequest, Progress, Weights
from worker.reference_engine import ReferenceEngine
from worker.turns import answered, followed_by, generate_turns, load_turns, segments_of

TURNS = make_turns()


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Weights, Weights]:
    return build_two_versions(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def models(versions: tuple[Weights, Weights]) -> ResidentModels:
    return ResidentModels({each.manifest_digest: each.path for each in versions}.__getitem__, max_resident=2)


@pytest.fixture
async def engine(versions: tuple[Weights, Weights]) -> AsyncIterator[ReferenceEngine]:
    engine = ReferenceEngine()
    await engine.start(versions[0])
    yield engine
    await engine.close()


def request(number: int, tokens: int = 64) -> GenerationRequest:
    return make_request(number, max_tokens=tokens)


async def finish(
    engine: ReferenceEngine, wanted: GenerationRequest, turns: Turns = TURNS
) -> tuple[Generation, list[tuple[int, ...]]]:
    """The whole, and what was told of its progress."""
    told: list[tuple[int, ...]] = []
    last: Progress | Generation | None = None
    async for last in generate_turns(engine, wanted, turns):
        if isinstance(last, Progress):
            told.append(last.token_ids)
    assert isinstance(last, Generation)
    return last, told


def check(generation: Generation, wanted: GenerationRequest, models: ResidentModels, turns: Turns = TURNS) -> None:
    """Every check of the verifier's passes."""
    claim = make_claim(generation, wanted, turns)
    found = prefill_rollouts([to_prefill(claim)], models)[0]
    verdict = run_checks(claim, found, BY_HAND)
    assert verdict.outcome is Outcome.ACCEPTED, verdict.detail
    assert verdict.audited and len(verdict.old_logprobs) == len(generation.token_ids)


async def test_what_turns_write_a_verifier_accepts(engine: ReferenceEngine, models: ResidentModels) -> None:
    calls = []
    for number in range(6):
        generation, told = await finish(engine, request(number))
        check(generation, request(number), models)
        segments = segments_of(generation, request(number).sampling, TURNS)
        authors = [segment.author for segment in segments]
        assert authors == [Author.MODEL, Author.ENVIRONMENT] * (len(authors) // 2) + [Author.MODEL]
        calls.append(len(authors) // 2)
        for turn, answer in zip(segments[::2], segments[1::2], strict=False):
            assert turn.token_ids[-1] in CALLS and not set(turn.token_ids[:-1]).intersection(CALLS)
            assert answer.token_ids == tuple(encode(backwards(decode(turn.token_ids))))[:6]
        assert all(generation.token_ids[: len(each)] == each for each in told)
        assert [len(each) for each in told] == sorted({len(each) for each in told})
        mask = [logprob for segment in segments for logprob in segment.loss_mask]
        assert all((logprob == 0.0) is not own for logprob, own in zip(generation.logprobs, mask, strict=True))
        (span,) = generation.spans
        assert (span.start, span.end) == (0, len(generation.token_ids))
    assert set(calls) == {2}, "a quarter of all tokens call: nobody gets by without"


async def test_the_seed_decides_as_if_the_answers_had_been_the_models(
    engine: ReferenceEngine, models: ResidentModels
) -> None:
    """Each turn's noise is that of its absolute position: a turn by itself, with everything before it as its prompt, is the
    same."""
    generation, _ = await finish(engine, request(1))
    first, answer, second, *_ = segments_of(generation, request(1).sampling, TURNS)
    alone = replace(
        request(1),
        prompt_token_ids=request(1).prompt_token_ids + first.token_ids + answer.token_ids,
        sampling=SamplingParams(1.0, 64 - len(first.token_ids) - len(answer.token_ids), (EOS_TOKEN_ID, *CALLS)),
    )
    last = [event async for event in engine.generate(alone)][-1]
    assert last.token_ids == second.token_ids


async def test_weights_swapped_between_turns_and_within_one(
    engine: ReferenceEngine, versions: tuple[Weights, Weights], models: ResidentModels
) -> None:
    """One turn is begun before the swap, or just behind an answer: a span never begins with the environment's tokens."""
    seen = set()
    for number in range(8):
        await engine.swap(versions[0])
        swap_at = 2 + 3 * number
        generation = None
        async for event in generate_turns(engine, request(number), TURNS):
            if isinstance(event, Progress) and len(event.token_ids) >= swap_at and swap_at:
                await engine.swap(versions[1])
                swap_at = 0
            generation = event
        assert isinstance(generation, Generation)
        if len(generation.spans) == 1:
            continue
        check(generation, request(number), models)
        border = generation.spans[1].start
        mask = [own for each in segments_of(generation, request(number).sampling, TURNS) for own in each.loss_mask]
        assert mask[border]
        seen.add(mask[border - 1])
    assert seen == {True, False}, "both kinds of borders were seen"


@pytest.mark.parametrize("length", range(8, 24))
async def test_no_length_breaks_it(engine: ReferenceEngine, models: ResidentModels, length: int) -> None:
    wanted = request(7, length)
    generation, _ = await finish(engine, wanted)
    check(generation, wanted, models)
    cut = TURNS.read(generation.token_ids, wanted.sampling).cut
    assert cut or generation.stop_reason is StopReason.EOS or len(generation.token_ids) == length
    assert not cut or length - 6 <= len(generation.token_ids) <= length


async def test_an_eos_ends_it_in_any_turn(engine: ReferenceEngine, models: ResidentModels) -> None:
    wanted = request(3)
    free, _ = await finish(engine, wanted)
    last_turn = segments_of(free, wanted.sampling, TURNS)[-1].token_ids
    before = free.token_ids[: len(free.token_ids) - len(last_turn)]
    eos = next(token for token in last_turn if token not in before and token not in CALLS)
    wanted = replace(wanted, sampling=replace(wanted.sampling, eos_token_ids=(eos,)))
    generation, _ = await finish(engine, wanted)
    assert generation.stop_reason is StopReason.EOS and generation.token_ids[-1] == eos
    assert len(segments_of(generation, wanted.sampling, TURNS)) == 5
    check(generation, wanted, models)


async def test_each_turn_is_a_request_of_its_own_that_fits(engine: ReferenceEngine) -> None:
    asked: list[GenerationRequest] = []

    class Listening(ReferenceEngine):
        def generate(self, request: GenerationRequest) -> AsyncIterator[Progress | Generation]:
            asked.append(request)
            return engine.generate(request)

    wanted = request(1)
    await finish(Listening(), wanted)
    assert len({each.request_id for each in asked}) == len(asked) == 3
    for each in asked:
        assert len(each.prompt_token_ids) + each.sampling.max_tokens == len(wanted.prompt_token_ids) + 64
        assert each.prompt_token_ids[: len(wanted.prompt_token_ids)] == wanted.prompt_token_ids
    assert [set(each.sampling.eos_token_ids) - {EOS_TOKEN_ID} for each in asked] == [set(CALLS), set(CALLS), set()]


async def test_who_stops_listening_ends_the_turn_that_runs(engine: ReferenceEngine) -> None:
    stream = generate_turns(engine, request(1), TURNS)
    async for event in stream:
        assert isinstance(event, Progress)
        break
    await stream.aclose()  # type: ignore[attr-defined]
    assert not engine._active


def part(tokens: int, *spans: tuple[int, int, int], proofs: int = 1) -> Generation:
    made = tuple(VersionSpan(version, f"sha256:{version}", start, end) for version, start, end in spans)
    named = tuple(tuple(b"%d.%d" % (span.version, n) for n in range(proofs)) for span in made)
    return Generation((1,) * tokens, (-1.0,) * tokens, made, named, StopReason.EOS)


def test_spans_and_proofs_of_turns_are_joined_where_a_version_goes_on() -> None:
    first = answered(part(3, (0, 0, 3)), (8, 9))
    assert (first.token_ids, first.logprobs) == ((1, 1, 1, 8, 9), (-1.0, -1.0, -1.0, 0.0, 0.0))
    same = followed_by(first, part(4, (0, 0, 1), (1, 1, 4)))
    assert [(span.version, span.start, span.end) for span in same.spans] == [(0, 0, 6), (1, 6, 9)]
    assert same.proofs == ((b"0.0", b"0.0"), (b"1.0",))
    other = followed_by(first, part(4, (2, 0, 4), proofs=2))
    assert [(span.version, span.start, span.end) for span in other.spans] == [(0, 0, 5), (2, 5, 9)]
    assert other.proofs == ((b"0.0",), (b"2.0", b"2.1"))


def test_turns_that_the_coordinator_would_refuse_are_not_handed_in() -> None:
    wrong = replace(part(2, (0, 0, 2)), token_ids=(65, 66))
    with pytest.raises(OurFault, match="turns that were generated are none"):
        segments_of(wrong, SamplingParams(1.0, 40, ()), TURNS)


def test_the_runs_rules_are_carried_out_with_the_tokenizer_that_its_weights_bring(
    versions: tuple[Weights, Weights], tmp_path: Path
) -> None:
    folder = versions[0].path
    turns = turns_of(CallingParity(), RunTokenizer(folder), (EOS_TOKEN_ID,), 40)
    assert turns is not None
    terms = make_terms(turns=(turns.rules,))
    (loaded,) = load_turns(terms, folder).items()
    assert loaded[0] == turns.rules.digest and loaded[1].answer((17, 10, 18, 1)) == turns.answer((17, 10, 18, 1))
    assert load_turns(make_terms(), tmp_path) == {}, "nothing is read where nothing is needed"
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + "\n")
    with pytest.raises(UserError, match="another tokenizer than its weights come with"):
        load_turns(terms, tmp_path)
    lying = make_terms(turns=(replace(turns.rules, probe="sha256:0"),))
    with pytest.raises(UserError, match="gives other answers here"):
        load_turns(lying, folder)
