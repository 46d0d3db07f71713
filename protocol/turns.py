"""Rollouts of several turns: where the model's turn ends, and what the environment then writes.

The model calls a tool by a token on which a call ends. The tool's answer follows as a segment of the environment's, and the
model goes on behind it:

    prompt │ MODEL … call │ ENVIRONMENT answer │ MODEL … call │ ENVIRONMENT answer │ MODEL … EOS

Everything here is a function of the tokens alone, so worker and verifier come to the same without trusting one another: who
wrote which token is read from the tokens (`Turns.read`), never from what somebody says about them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256

from protocol.errors import OurFault
from protocol.rollout import SamplingParams, Segment

CALLS_MAX = 256
STOP_TOKENS_MAX = 256
ANSWER_TOKENS_MAX = 4096
_CALL_CHARACTERS = 4096  # of a turn's end, that a tool is shown
_ANSWER_CHARACTERS = 16  # for each token that an answer may have
_FAILED = "error"  # the answer of a tool that raises or says nothing
_PROBES = 64
_PROBE_LETTERS = '0123456789+-*/(). =<>abcxyzABC"{}:,\nÄ'

Tool = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class TurnRules:
    """What a run's terms say of one kind of turns. A worker that would answer otherwise must not begin.

    `tool`: its name; `tool_digest`: of its source. `stop`: the text on which a call ends, `stop_token_ids`: the tokens that
    end so, each of which ends a call. `max_calls`: calls beyond them are text like other text. `max_answer_tokens`: longer
    answers are cut. `probe`: digest of the answers to calls that both sides can make up.
    """

    tool: str
    tool_digest: str
    tokenizer_digest: str
    stop: str
    stop_token_ids: tuple[int, ...]
    max_calls: int
    max_answer_tokens: int
    probe: str = ""

    @property
    def digest(self) -> str:
        """What a lease names the rules by."""
        return "sha256:" + sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Reading:
    """Tokens by who must have written them. `problem`: why they can't have come about, else empty. `cut`: they end in a
    call whose answer has no room any more, which ends a rollout as the length limit does."""

    segments: tuple[Segment, ...]
    problem: str = ""
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Turns:
    """The rules, with the tokenizer and the tool that carry them out. Holds nothing that a process could not be sent."""

    rules: TurnRules
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    tool: Tool

    def stops(self, calls: int) -> tuple[int, ...]:
        """The tokens that end a turn, when so many calls were answered."""
        return self.rules.stop_token_ids if calls < self.rules.max_calls else ()

    def has_room(self, tokens: int, max_tokens: int) -> bool:
        """Whether a call that ends with the `tokens`-th token is answered: the longest answer would leave the model a token."""
        return tokens + self.rules.max_answer_tokens < max_tokens

    def is_answered(self, token_ids: Sequence[int], calls: int, max_tokens: int) -> bool:
        """Whether all that was written so far ends in a call, after `calls` that were answered, that the tool answers too."""
        return token_ids[-1] in self.stops(calls) and self.has_room(len(token_ids), max_tokens)

    def answer(self, turn_token_ids: Sequence[int]) -> tuple[int, ...]:
        """The environment's tokens behind a turn that ended in a call: never none, never more than the rules admit.

        Raises OurFault if the tool could not do its work here.
        """
        call = self.decode(turn_token_ids).removesuffix(self.rules.stop)[-_CALL_CHARACTERS:]
        try:
            text = self.tool(call)
        except (RecursionError, MemoryError) as error:  # these depend on where it runs, so they can be no answer
            raise OurFault(f"the tool {self.rules.tool!r} ran out of room here: {type(error).__name__}") from error
        except Exception:  # a tool is total: what else it raises is an answer, the same on every side
            text = _FAILED
        most = self.rules.max_answer_tokens
        return tuple(self.encode(text[: _ANSWER_CHARACTERS * most]) or self.encode(_FAILED))[:most]

    def read(self, token_ids: Sequence[int], sampling: SamplingParams) -> Reading:
        """Who wrote what. Lengths, and where EOS may stand, are other rules' to say."""
        tokens = tuple(token_ids)
        segments: list[Segment] = []
        at = calls = 0
        while True:
            stops = self.stops(calls)
            end = _first(tokens, at, {*stops, *sampling.eos_token_ids})
            segments.append(Segment.by_model(tokens[at:end]))
            if end == at or tokens[end - 1] in sampling.eos_token_ids or tokens[end - 1] not in stops:
                return self._last_turn(segments, tokens, end)
            if not self.has_room(end, sampling.max_tokens):
                problem = "tokens follow a call that has no room for its answer" if end < len(tokens) else ""
                return Reading(tuple(segments), problem, cut=not problem)
            answer = self.answer(tokens[at:end])
            at = end + len(answer)
            if tokens[end:at] != answer:
                return Reading(tuple(segments), _other_answer(calls, end, tokens[end:at], answer))
            segments.append(Segment.by_environment(answer))
            calls += 1

    def _last_turn(self, segments: list[Segment], tokens: tuple[int, ...], end: int) -> Reading:
        if not segments[-1].token_ids:
            return Reading(tuple(segments[:-1]), "it ends with the environment's tokens; the model goes on behind them")
        problem = "tokens follow an EOS; generation must end at the first one" if end < len(tokens) else ""
        return Reading(tuple(segments), problem)

    def probe(self) -> str:
        """A digest of the answers to calls made up from the rules alone: it differs wherever tokenizers, their libraries or
        tools do."""
        stops = self.rules.stop_token_ids
        digest = sha256()
        for number in range(_PROBES):
            drawn = sha256(f"rollswarm probe {number}".encode()).digest()
            text = "".join(_PROBE_LETTERS[byte % len(_PROBE_LETTERS)] for byte in drawn)
            turn = [*self.encode(text), stops[number % len(stops)]]
            digest.update(json.dumps([self.decode(turn), self.answer(turn)]).encode())
        return "sha256:" + digest.hexdigest()


def _first(tokens: tuple[int, ...], start: int, wanted: set[int]) -> int:
    """One past the first of these tokens from `start` on; the end if there is none."""
    return next((place + 1 for place in range(start, len(tokens)) if tokens[place] in wanted), len(tokens))


def _other_answer(calls: int, start: int, came: tuple[int, ...], answer: tuple[int, ...]) -> str:
    if not came:
        return f"it ends with call {calls + 1}, whose answer is missing"
    return (
        f"behind call {calls + 1}, from token {start} on, must stand the tool's answer, the {len(answer)} tokens "
        f"{list(answer[:8])}, and there stand {list(came[:8])}"
    )
