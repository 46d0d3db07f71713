"""Samples to generate, and the claims that a worker would hand in for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from coordinator.config import model_shape
from coordinator.verification.checks import Claim
from environments.arithmetic import Arithmetic
from protocol.rollout import Rollout, SamplingParams, Segment
from protocol.tokenizer import RunTokenizer
from worker.engine import Generation, GenerationRequest

PROMPT_TOKENS = 12
_OPEN_ENDED = (
    "Once upon a time, in a village by the sea, there lived an old man who",
    "The main causes of the French Revolution were, in the order of their weight,",
    "To bake a good loaf of bread, first take a large bowl, and then",
    "Question: A train leaves at noon and travels at 60 km/h. How far is it after three hours?",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1)",
    "Dear Sir or Madam, I am writing to you because I have been told that",
)
_SHORT_TOKENS = (2, 3, 4, 6, 8, 8, 12, 20)


def prompts(folder: Path) -> Iterator[tuple[int, ...]]:
    """Sums and the beginnings of texts, by turns, forever; each of `PROMPT_TOKENS` tokens, so that a batch needs no padding."""
    tokenizer = RunTokenizer(folder)
    sums = Arithmetic()
    for number in itertools.count():
        text = sums.task(number).prompt if number % 2 else _OPEN_ENDED[number // 2 % len(_OPEN_ENDED)]
        tokens = tuple(tokenizer.encode(text))
        yield (tokens * -(-PROMPT_TOKENS // len(tokens)))[-PROMPT_TOKENS:]


def requests(folder: Path, *, count: int, tokens: int, eos: Sequence[int], seed: int) -> list[GenerationRequest]:
    """Samples of at most `tokens` tokens, every one with a seed of its own."""
    draw = np.random.default_rng(seed)
    sampling = SamplingParams(1.0, tokens, tuple(eos))
    return [
        GenerationRequest(f"{seed}-{number}", prompt, sampling, int(draw.integers(0, 2**63 - 1)))
        for number, prompt in zip(range(count), prompts(folder), strict=False)
    ]


def mixed_requests(folder: Path, *, count: int, tokens: int, eos: Sequence[int], seed: int) -> list[GenerationRequest]:
    """The same, but every other one short, at lengths of every class."""
    short = itertools.cycle(_SHORT_TOKENS)
    found = requests(folder, count=count, tokens=tokens, eos=eos, seed=seed)
    for number in range(0, count, 2):
        each = found[number]
        sampling = SamplingParams(1.0, min(tokens, next(short)), tuple(eos))
        found[number] = GenerationRequest(each.request_id, each.prompt_token_ids, sampling, each.seed)
    return found


def claims(written: Sequence[Generation], asked: Sequence[GenerationRequest], folder: Path) -> list[Claim]:
    """The generations as a worker would submit them."""
    vocabulary, hidden = model_shape(folder)
    return [
        Claim(
            _rollout(generation, request), request.prompt_token_ids, request.sampling, request.seed, vocabulary, hidden
        )
        for generation, request in zip(written, asked, strict=True)
    ]


def _rollout(generation: Generation, request: GenerationRequest) -> Rollout:
    return Rollout(
        run_id="benchmark",
        lease_id="lease",
        sample_id=request.request_id,
        segments=(Segment.by_model(generation.token_ids),),
        logprobs=generation.logprobs,
        spans=generation.spans,
        proofs=generation.proofs,
        stop_reason=generation.stop_reason,
    )
