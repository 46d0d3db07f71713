"""Completions of several turns for an evaluation, upon a sampler that knows of none: all turns of one number at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.rollout import SamplingParams, written_by_model
from protocol.turns import Turns
from trainer.sampling import Sampler

_ROOMS_APART = 1 << 16  # of those with so many tokens left and those with one more
_SEEDS_APART = 1 << 32  # of one turn's draws and the next's: far above how many seeds an evaluation uses


@dataclass(slots=True)
class _Sample:
    """A completion under way: all tokens behind the prompt, and those of the model's newest turn."""

    prompt: list[int]
    tokens: list[int]
    turn: list[int]


async def complete_turns(
    sampler: Sampler,
    prompts: Sequence[Sequence[int]],
    turns: Turns | None,
    *,
    temperature: float,
    max_tokens: int,
    eos_token_ids: Sequence[int],
    seed: int,
    samples: int,
) -> list[list[list[int]]]:
    """As Sampler.complete: for each prompt `samples` completions. Of those of several turns, the model's own tokens."""
    first = await sampler.complete(
        prompts,
        temperature=temperature,
        max_tokens=max_tokens,
        eos_token_ids=(*eos_token_ids, *(turns.stops(0) if turns else ())),
        seed=seed,
        samples=samples,
    )
    if turns is None:
        return first
    everyone = [
        _Sample(list(prompt), list(turn), turn) for prompt, drawn in zip(prompts, first, strict=True) for turn in drawn
    ]
    calling = everyone
    for calls in range(turns.rules.max_calls):
        calling = [each for each in calling if turns.is_answered(each.tokens, calls, max_tokens)]
        if not calling:
            break
        for each in calling:
            each.tokens += turns.answer(each.turn)
        by_room: dict[int, list[_Sample]] = {}  # so none is asked for more than prompt and max_tokens together
        for each in calling:
            by_room.setdefault(max_tokens - len(each.tokens), []).append(each)
        for room, some in sorted(by_room.items()):
            drawn = await sampler.complete(
                [each.prompt + each.tokens for each in some],
                temperature=temperature,
                max_tokens=room,
                eos_token_ids=(*eos_token_ids, *turns.stops(calls + 1)),
                seed=seed + (calls + 1) * _SEEDS_APART + room * _ROOMS_APART,
                samples=1,
            )
            for each, (turn,) in zip(some, drawn, strict=True):
                each.turn = turn
                each.tokens += turn
    sampling = SamplingParams(1.0, max_tokens, tuple(eos_token_ids))
    own = [_own(turns, each.tokens, sampling) for each in everyone]
    return [own[at : at + samples] for at in range(0, len(own), samples)]


def _own(turns: Turns, tokens: Sequence[int], sampling: SamplingParams) -> list[int]:
    """What the model wrote, one turn after the other."""
    reading = turns.read(tokens, sampling)
    assert not reading.problem, reading.problem
    return list(written_by_model(reading.segments))
