"""Cheats by request: the right weights generate something else than what was leased."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from tests.adversary.attacks.cheat import Cheat
from worker.engine import Generation, GenerationRequest

_SYSTEM_PROMPT = tuple(range(100, 108))


class HiddenPrompt(Cheat):
    """Feeds tokens before the prompt that it does not claim: a system prompt that makes answers better."""

    def request(self, issued: GenerationRequest) -> GenerationRequest:
        return replace(issued, prompt_token_ids=(*_SYSTEM_PROMPT, *issued.prompt_token_ids))


class OtherPrompt(Cheat):
    """Answers another task: one that it knows to be easy."""

    def request(self, issued: GenerationRequest) -> GenerationRequest:
        return replace(issued, prompt_token_ids=issued.prompt_token_ids[::-1])


class OtherTemperature(Cheat):
    """Samples more greedily than the lease asks."""

    def __init__(self, factor: float = 0.5) -> None:
        self._factor = factor

    def request(self, issued: GenerationRequest) -> GenerationRequest:
        sampling = replace(issued.sampling, temperature=issued.sampling.temperature * self._factor)
        return replace(issued, sampling=sampling)


class OtherSeed(Cheat):
    """Draws with a seed of its own."""

    commits = False

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def request(self, issued: GenerationRequest) -> GenerationRequest:
        return replace(issued, seed=issued.seed ^ (1 + self._random.getrandbits(61)))


class BestOfN(OtherSeed):
    """Draws several times with seeds of its own, the issued one first, and hands in what pays most."""

    def __init__(self, draws: int, pays: Callable[[Generation], float], seed: int = 0) -> None:
        super().__init__(seed)
        self._draws = draws
        self._pays = pays

    def draws(self, issued: GenerationRequest) -> list[GenerationRequest]:
        others = [self.request(issued) for _ in range(self._draws - 1)]
        return [replace(r, request_id=f"{issued.request_id}/{n}") for n, r in enumerate([issued, *others])]

    def pick(self, drawn: Sequence[Generation]) -> Generation:
        return max(drawn, key=self._pays)
