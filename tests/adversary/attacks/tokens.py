"""Cheats by tokens: an honest generation is altered before it is signed."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace
from typing import Literal

from protocol.rollout import PROOF_CHUNK_TOKENS, StopReason, VersionSpan
from tests.adversary.attacks.cheat import Cheat
from worker.engine import Generation, GenerationRequest

Place = Literal["early", "middle", "last"]


class OtherTokens(Cheat):
    """Hands in tokens that nobody generated, under the proofs of those that were."""

    commits = False

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def falsify(self, honest: Generation, issued: GenerationRequest) -> Generation:
        tokens = list(honest.token_ids)
        for index in range(changeable(honest)):
            tokens[index] = self.another(tokens[index], issued)
        return replace(honest, token_ids=tuple(tokens))

    def another(self, token: int, issued: GenerationRequest) -> int:
        """An ordinary token, taken from the prompt's neighbourhood, so that any vocabulary has it."""
        known = (*issued.prompt_token_ids, 1, 2, 3, 4)
        return self._random.choice([t for t in known if t != token and t not in issued.sampling.eos_token_ids])


class EditedToken(OtherTokens):
    """Changes one token, so that a wrong answer becomes right."""

    def __init__(self, place: Place, seed: int = 0) -> None:
        super().__init__(seed)
        self._place = place

    def falsify(self, honest: Generation, issued: GenerationRequest) -> Generation:
        tokens, last = list(honest.token_ids), changeable(honest) - 1
        index = {"early": 0, "middle": last // 2, "last": last}[self._place]
        tokens[index] = self.another(tokens[index], issued)
        return replace(honest, token_ids=tuple(tokens))


class Replay(Cheat):
    """Generates once, and answers every later sample with the same completion: its own earlier one, or another's."""

    commits = False

    def __init__(self) -> None:
        self._first: Generation | None = None

    def falsify(self, honest: Generation, issued: GenerationRequest) -> Generation:
        self._first = self._first or honest
        return self._first


class Truncated(Cheat):
    """Ends where it looks best: cuts the completion and appends an EOS."""

    commits = False

    def falsify(self, honest: Generation, issued: GenerationRequest) -> Generation:
        length = max(1, len(honest.token_ids) // 2)
        return cut(honest, length, issued.sampling.eos_token_ids)


def changeable(generation: Generation) -> int:
    """How many tokens may be changed without changing how it ends. A lone EOS has nothing before it: it goes itself."""
    return max(1, len(generation.token_ids) - (generation.stop_reason is StopReason.EOS))


def cut(generation: Generation, length: int, eos_token_ids: Collection[int]) -> Generation:
    """`length` tokens, the last of which is an EOS, with as many of the proofs, log-probs and spans."""
    spans = tuple(replace(s, end=min(s.end, length)) for s in generation.spans if s.start < length)
    proofs = tuple(p[: _chunks(s)] for s, p in zip(spans, generation.proofs, strict=False))
    tokens = (*generation.token_ids[: length - 1], next(iter(eos_token_ids)))
    return Generation(tokens, generation.logprobs[:length], spans, proofs, StopReason.EOS)


def _chunks(span: VersionSpan) -> int:
    return -(-len(span) // PROOF_CHUNK_TOKENS)
