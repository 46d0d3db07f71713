"""Rollouts of several turns, upon an engine that knows of none: each turn is a request of its own.

A turn's prompt is everything before it, so positions, and with them the seed's noise, count on; the prefix cache spares the
engine most of the work. A turn ends at an EOS, at the length limit, or at a token on which a call ends: then the tool's
answer is appended, and the next turn begins, under whatever weights are loaded by then.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from environments.turns import turns_by
from protocol.errors import OurFault
from protocol.rollout import ENVIRONMENT_LOGPROB, SamplingParams, Segment, StopReason, VersionSpan
from protocol.terms import RunTerms
from protocol.tokenizer import RunTokenizer
from protocol.turns import Turns
from worker.engine import Engine, Generation, GenerationRequest, Progress

_NOTHING = Generation((), (), (), (), StopReason.LENGTH)


def load_turns(terms: RunTerms, folder: Path) -> dict[str, Turns]:
    """The run's turns by the digest of their rules, with the tokenizer of these weights.

    Raises UserError if this machine would answer otherwise than the run's own side.
    """
    if not terms.turns:
        return {}
    tokenizer = RunTokenizer(folder)
    return {rules.digest: turns_by(rules, tokenizer) for rules in terms.turns}


async def generate_turns(
    engine: Engine, request: GenerationRequest, turns: Turns
) -> AsyncIterator[Progress | Generation]:
    """As Engine.generate: tokens so far, the environment's among them, and last the whole."""
    so_far, calls = _NOTHING, 0
    sampling = request.sampling
    while True:
        turn = replace(
            request,
            request_id=f"{request.request_id}.{calls}",
            prompt_token_ids=request.prompt_token_ids + so_far.token_ids,
            sampling=replace(
                sampling,
                max_tokens=sampling.max_tokens - len(so_far.token_ids),
                eos_token_ids=sampling.eos_token_ids + turns.stops(calls),
            ),
        )
        written: Generation | None = None
        async with contextlib.aclosing(engine.generate(turn)) as stream:  # type: ignore[type-var]
            async for event in stream:
                if isinstance(event, Progress):
                    yield Progress(so_far.token_ids + event.token_ids)
                else:
                    written = event
        if written is None:
            raise OurFault("the engine ended a turn without a result")
        so_far = followed_by(so_far, written)
        if not turns.is_answered(so_far.token_ids, calls, sampling.max_tokens):
            ended = StopReason.EOS if so_far.token_ids[-1] in sampling.eos_token_ids else StopReason.LENGTH
            yield replace(so_far, stop_reason=ended)
            return
        so_far = answered(so_far, turns.answer(written.token_ids))
        calls += 1
        yield Progress(so_far.token_ids)


def followed_by(before: Generation, turn: Generation) -> Generation:
    """Both as one. Where the same version goes on, its span does, and the turn's proofs stand behind those before."""
    start = len(before.token_ids)
    moved = [replace(span, start=span.start + start, end=span.end + start) for span in turn.spans]
    spans, proofs = list(before.spans), list(before.proofs)
    for span, own in zip(moved, turn.proofs, strict=True):
        if spans and spans[-1].version == span.version:
            spans[-1], proofs[-1] = replace(spans[-1], end=span.end), proofs[-1] + own
        else:
            spans.append(span)
            proofs.append(own)
    return Generation(
        before.token_ids + turn.token_ids,
        before.logprobs + turn.logprobs,
        tuple(spans),
        tuple(proofs),
        turn.stop_reason,
    )


def answered(before: Generation, answer: tuple[int, ...]) -> Generation:
    """With the environment's tokens behind it, in the span of the token before them."""
    last: VersionSpan = before.spans[-1]
    return replace(
        before,
        token_ids=before.token_ids + answer,
        logprobs=before.logprobs + (ENVIRONMENT_LOGPROB,) * len(answer),
        spans=(*before.spans[:-1], replace(last, end=last.end + len(answer))),
    )


def segments_of(generation: Generation, sampling: SamplingParams, turns: Turns | None) -> tuple[Segment, ...]:
    """Who wrote what, as the coordinator will read it. Raises OurFault if it would not accept that."""
    if turns is None:
        return (Segment.by_model(generation.token_ids),)
    reading = turns.read(generation.token_ids, sampling)
    if reading.problem:
        raise OurFault(f"the turns that were generated are none: {reading.problem}")
    return reading.segments
