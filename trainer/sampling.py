"""Who writes the completions of an evaluation: a model of transformers in this process, or whatever else has these verbs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol


class Sampler(Protocol):
    """`start` once, then `complete` as often as wanted, then `close`."""

    async def start(self, model: Path, longest: int) -> None:
        """Load a policy folder, for sequences of at most `longest` tokens, prompt included."""
        ...

    async def complete(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        temperature: float,
        max_tokens: int,
        eos_token_ids: Sequence[int],
        seed: int,
        samples: int,
    ) -> list[list[list[int]]]:
        """For each prompt `samples` completions as token ids, the ending EOS included if one came."""
        ...

    async def close(self) -> None:
        """Free what was loaded. Safe to call twice."""
        ...


class TransformersSampler:
    """In this process, on the CPU, in float32: its draws are the same on every run."""

    def __init__(self) -> None:
        self._model: Any = None

    async def start(self, model: Path, longest: int) -> None:
        """See Sampler. Raises UserError for a folder that holds no policy."""
        from trainer.crew import load_model

        self._model = (await asyncio.to_thread(load_model, model, "float32", "cpu")).eval()

    async def complete(self, prompts: Sequence[Sequence[int]], **how: Any) -> list[list[list[int]]]:
        """See Sampler."""
        from trainer.scoring import generate_completions

        return await asyncio.to_thread(generate_completions, self._model, prompts, **how)

    async def close(self) -> None:
        """See Sampler."""
        self._model = None
