"""An engine that cheats, upon another engine: one process serves every cheat, one after the other."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from tests.adversary.attacks.cheat import Cheat
from worker.engine import Engine, Generation, GenerationRequest, Progress, SwapReport, Weights


class CheatingEngine:
    """Implements worker.engine.Engine. `cheat` may be changed between requests; `swap` then loads what it generates with."""

    def __init__(self, inner: Engine, cheat: Cheat) -> None:
        self._inner = inner
        self.cheat = cheat
        self._scratch = tempfile.TemporaryDirectory(prefix="cheater-")

    @property
    def build(self) -> str:
        return self._inner.build

    async def start(self, weights: Weights) -> None:
        await self._inner.start(self._tampered(weights))

    async def swap(self, weights: Weights) -> SwapReport:
        return await self._inner.swap(self._tampered(weights))

    async def close(self) -> None:
        await self._inner.close()
        self._scratch.cleanup()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Progress | Generation]:
        cheat, drawn = self.cheat, []
        for number, draw in enumerate(cheat.draws(request)):
            stream = self._inner.generate(replace(draw, request_id=f"{request.request_id}/{number}"))
            try:
                async for event in stream:
                    if isinstance(event, Generation):
                        drawn.append(event)
                    elif cheat.commits:
                        yield event
            finally:
                await stream.aclose()  # type: ignore[attr-defined]
        yield cheat.falsify(cheat.pick(drawn), request)

    def _tampered(self, weights: Weights) -> Weights:
        return self.cheat.weights(weights, Path(self._scratch.name))
