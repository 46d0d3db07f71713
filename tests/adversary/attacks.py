"""Cheats as switches of an honest engine: one engine process serves them all.

`other_weights`  generates with weights plus noise, and claims the published version
`random_tokens`  hands in tokens that nobody generated, under proofs of others
`wrong_seed`     draws with a seed of its own choice
`edited_token`   changes one token of an honest completion
"""

from __future__ import annotations

import enum
import random
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from worker.engine import Engine, Generation, GenerationRequest, Progress, SwapReport, Weights


class Attack(enum.StrEnum):
    HONEST = "honest"
    OTHER_WEIGHTS = "other_weights"
    RANDOM_TOKENS = "random_tokens"
    WRONG_SEED = "wrong_seed"
    EDITED_TOKEN = "edited_token"


class CheatingEngine:
    """Implements worker.engine.Engine upon another engine. `attack` may be changed between requests."""

    def __init__(self, inner: Engine, attack: Attack, *, noise: float = 0.1, seed: int = 0) -> None:
        self._inner = inner
        self.attack = attack
        self._noise = noise
        self._random = random.Random(seed)
        self._scratch = tempfile.TemporaryDirectory(prefix="cheater-")
        self._vocab_size = 0

    async def start(self, weights: Weights) -> None:
        await self._inner.start(self._tamper(weights))

    async def swap(self, weights: Weights) -> SwapReport:
        return await self._inner.swap(self._tamper(weights))

    async def close(self) -> None:
        await self._inner.close()
        self._scratch.cleanup()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Progress | Generation]:
        if self.attack is Attack.WRONG_SEED:
            request = replace(request, seed=request.seed ^ self._random.getrandbits(62))
        stream = self._inner.generate(request)
        try:
            async for event in stream:
                if isinstance(event, Generation):
                    yield self._falsify(event, request)
                elif self.attack in (Attack.HONEST, Attack.OTHER_WEIGHTS, Attack.WRONG_SEED):
                    yield event  # other cheats commit to nothing that they would have to extend
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    def _falsify(self, honest: Generation, request: GenerationRequest) -> Generation:
        tokens = list(honest.token_ids)
        eos = set(request.sampling.eos_token_ids)
        # A lone EOS has nothing before it to change, so it is changed itself.
        last = max(1, len(tokens) - 1) if tokens[-1] in eos else len(tokens)
        if self.attack is Attack.RANDOM_TOKENS:
            tokens[:last] = [self._another(token, eos) for token in tokens[:last]]
        elif self.attack is Attack.EDITED_TOKEN:
            place = self._random.randrange(last)
            tokens[place] = self._another(tokens[place], eos)
        return replace(honest, token_ids=tuple(tokens))

    def _another(self, token: int, eos: set[int]) -> int:
        while True:
            drawn = self._random.randrange(self._vocab_size)
            if drawn != token and drawn not in eos:
                return drawn

    def _tamper(self, weights: Weights) -> Weights:
        """The folder to load: a noised copy where that is the cheat. Claims stay those of the published version."""
        import json

        self._vocab_size = json.loads((weights.path / "config.json").read_text())["vocab_size"]
        if self.attack is not Attack.OTHER_WEIGHTS:
            return weights
        return replace(weights, path=noised_copy(weights.path, Path(self._scratch.name), self._noise))


def noised_copy(folder: Path, scratch: Path, noise: float) -> Path:
    """A copy of a model folder with every matrix w ← w · (1 + noise · N(0, 1))."""
    import torch
    from safetensors.torch import load_file, save_file

    target = Path(tempfile.mkdtemp(dir=scratch))
    generator = torch.Generator().manual_seed(0)
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            shutil.copyfile(file, target / file.name)
            continue
        state = {
            name: (tensor.float() * (1 + noise * torch.randn(tensor.shape, generator=generator))).to(tensor.dtype)
            for name, tensor in load_file(file).items()
        }
        save_file(state, target / file.name, metadata={"format": "pt"})
    return target
