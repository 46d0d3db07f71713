"""Who wrote what is a function of the tokens: what an honest worker makes is read as it was made, and nothing else is."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import OurFault
from protocol.rollout import Author, SamplingParams, Segment
from protocol.turns import Turns
from tests.turns import EQUALS, decode, encode, make_sums, make_turns

EOS = 256
SAMPLING = SamplingParams(1.0, 40, (EOS,))
SUMS = make_sums()


def model(text: str, *, eos: bool = False) -> Segment:
    return Segment.by_model((*encode(text), *[EOS] * eos))


def tool(text: str) -> Segment:
    return Segment.by_environment(tuple(encode(text)))


def tokens(*segments: Segment) -> tuple[int, ...]:
    return tuple(token for segment in segments for token in segment.token_ids)


HONEST = {
    "no call": (model("seven", eos=True),),
    "no call, cut": (model("x" * 40),),
    "one call": (model("1+2="), tool("3"), model(" so three", eos=True)),
    "two calls": (model("1+2="), tool("3"), model("*5 is 3*5="), tool("15"), model("", eos=True)),
    "a third call is text": (model("1="), tool("1"), model("2="), tool("2"), model("3=4=", eos=True)),
    "a call that is none": (model("what="), tool("erro"), model("?", eos=True)),
    "an answer that is cut": (model("99999*99999="), tool("9999"), model(".", eos=True)),
    "no sum since the last": (model("="), tool("erro"), model("=", eos=False), tool("erro"), model("x" * 30)),
}


@pytest.mark.parametrize("segments", HONEST.values(), ids=HONEST)
def test_an_honest_rollout_is_read_as_it_was_made(segments: tuple[Segment, ...]) -> None:
    reading = SUMS.read(tokens(*segments), SAMPLING)
    assert (reading.problem, reading.cut) == ("", False)
    assert reading.segments == segments
    for segment in segments:
        assert set(segment.loss_mask) <= {segment.author is Author.MODEL}


@pytest.mark.parametrize(("length", "cut"), [(34, False), (35, False), (36, True), (40, True)])
def test_a_call_without_room_for_the_longest_answer_and_a_token_ends_it(length: int, cut: bool) -> None:
    call = (*encode("x" * (length - 4) + "1+1"), EQUALS)
    reading = SUMS.read(call, SAMPLING)
    assert reading.cut is cut
    assert ("answer is missing" in reading.problem) is not cut
    assert reading.segments == (Segment.by_model(call),)
    if cut and length < 40:
        assert "no room" in SUMS.read((*call, 7), SAMPLING).problem


IMPOSSIBLE = {
    "altered": (tokens(model("1+2="), tool("4"), model("!", eos=True)), "must stand the tool's answer"),
    "shortened": (tokens(model("12+2="), tool("1"), model("!", eos=True)), "must stand the tool's answer"),
    "left out": (tokens(model("1+2="), model("!", eos=True)), "must stand the tool's answer"),
    "missing at the end": (tokens(model("1+2=")), "call 1, whose answer is missing"),
    "half at the end": (tokens(model("12+2="), tool("1")), "must stand the tool's answer"),
    "ends with it": (tokens(model("1+2="), tool("3")), "the model goes on behind them"),
    "second altered": (tokens(model("1="), tool("1"), model("2="), tool("3"), model("", eos=True)), "behind call 2"),
    "behind EOS": (tokens(model("1+2", eos=True), model("=3", eos=True)), "tokens follow an EOS"),
    "answer behind EOS": (tokens(model("12", eos=True), tool("3")), "EOS"),
}


@pytest.mark.parametrize(("token_ids", "message"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_can_t_have_come_about_is_said_to_be_so(token_ids: tuple[int, ...], message: str) -> None:
    assert message in SUMS.read(token_ids, SAMPLING).problem


def test_an_answer_where_no_call_ended_is_read_as_the_models_own_words() -> None:
    """So its tokens must be drawn by the seed, as all of the model's must."""
    forged = tokens(model("1+2"), tool("3"), model("", eos=True))
    assert SUMS.read(forged, SAMPLING).segments == (Segment.by_model(forged),)


def test_a_tool_that_raises_or_is_silent_answers_with_an_error() -> None:
    def broken(call: str) -> str:
        raise RuntimeError(call)

    for tool_ in (broken, lambda call: ""):
        assert decode(make_turns(tool=tool_).answer((65, 66))) == "error"


@pytest.mark.parametrize("error", [RecursionError, MemoryError])
def test_a_tool_that_runs_out_of_room_answers_nothing(error: type[Exception]) -> None:
    def deep(call: str) -> str:
        raise error

    with pytest.raises(OurFault, match="ran out of room here"):
        replace(make_sums(), tool=deep).answer([*encode("1+2"), EQUALS])


def test_a_tool_sees_the_turn_without_the_text_that_ended_it_and_not_more_than_its_end() -> None:
    seen: list[str] = []
    turns = make_turns(tool=lambda call: str(seen.append(call)))
    turns = replace(turns, rules=replace(turns.rules, stop="=>"))
    turns.answer(encode("x" * 5000 + "12=>"))
    assert seen[0].endswith("x12") and len(seen[0]) == 4096


def test_an_answer_of_a_million_characters_costs_no_more_than_its_bound() -> None:
    encoded: list[int] = []

    def counting(text: str) -> list[int]:
        encoded.append(len(text))
        return encode(text)

    turns = replace(make_turns(max_answer_tokens=6, tool=lambda call: "y" * 1_000_000), encode=counting)
    assert turns.answer((1,)) == (ord("y"),) * 6
    assert encoded == [96]


def test_rules_have_a_name_that_hangs_on_all_of_them() -> None:
    rules = SUMS.rules
    others = [
        replace(rules, tool="other"),
        replace(rules, tool_digest="sha256:other"),
        replace(rules, tokenizer_digest="sha256:other"),
        replace(rules, stop_token_ids=(1,)),
        replace(rules, max_calls=3),
        replace(rules, max_answer_tokens=5),
    ]
    assert len({each.digest for each in (rules, *others)}) == len(others) + 1


def test_a_probe_tells_other_tools_and_other_tokenizers_apart() -> None:
    turns = make_turns()
    assert turns.probe() == make_turns().probe()
    assert turns.probe() != replace(turns, tool=lambda call: "x").probe()
    assert turns.probe() != replace(turns, decode=lambda ids: decode(ids).lower()).probe()
    assert turns.probe() != replace(turns, encode=lambda text: encode(text)[::-1]).probe()


def written(turns: Turns, draw: random.Random, sampling: SamplingParams) -> tuple[list[int], list[Segment], bool]:
    """What an honest worker makes of a model that writes at random, and whether it ended in a call without room."""
    made: list[int] = []
    segments: list[Segment] = []
    calls = 0
    while True:
        turn: list[int] = []
        stops = turns.stops(calls)
        while len(made) + len(turn) < sampling.max_tokens:
            turn.append(draw.choice((EOS, *[EQUALS] * 3, *encode("12+*"), 200)))
            if turn[-1] == EOS or turn[-1] in stops:
                break
        made += turn
        segments.append(Segment.by_model(tuple(turn)))
        if turn[-1] not in stops:
            return made, segments, False
        if not turns.has_room(len(made), sampling.max_tokens):
            return made, segments, True
        answer = turns.answer(turn)
        made += answer
        segments.append(Segment.by_environment(answer))
        calls += 1


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(1, 6), st.integers(8, 60))
def test_whatever_a_model_writes_is_read_alike_and_no_answer_can_be_altered(
    draw: random.Random, max_calls: int, max_answer: int, max_tokens: int
) -> None:
    turns = make_sums(max_calls=max_calls, max_answer_tokens=max_answer)
    sampling = SamplingParams(1.0, max_tokens, (EOS,))
    made, segments, cut = written(turns, draw, sampling)
    reading = turns.read(made, sampling)
    assert (reading.segments, reading.problem, reading.cut) == (tuple(segments), "", cut)
    assert len(made) <= max_tokens and segments[-1].author is Author.MODEL
    at = 0
    for segment in segments:
        if segment.author is Author.ENVIRONMENT:
            place = at + draw.randrange(len(segment.token_ids))
            assert turns.read([*made[:place], made[place] ^ 1, *made[place + 1 :]], sampling).problem
            shorter = turns.read([*made[:place], *made[place + 1 :]], sampling)
            claimed = [each.token_ids for each in segments if each is not segment]
            assert shorter.problem or [each.token_ids for each in shorter.segments] != claimed
        at += len(segment.token_ids)
