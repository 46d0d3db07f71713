"""The engine as the worker's loop sees it: a few verbs, two implementations.

`worker.vllm_engine.engine.VllmEngine` is the real one; `worker.reference_engine.ReferenceEngine` (transformers, one
sequence at a time, the definition of what is right) serves unit tests and is never the default.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from protocol.errors import OurFault
from protocol.rollout import SamplingParams, StopReason, VersionSpan


@dataclass(frozen=True, slots=True)
class Weights:
    """A policy version on disk: a Hugging Face folder (safetensors, config, tokenizer)."""

    version: int
    manifest_digest: str
    path: Path


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sample to generate. `seed`: 63-bit, issued by the coordinator. `request_id` is unique in this engine."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Tokens so far (all of them, not the increment), for lease renewals and the console."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished sample: T tokens, T float32 log-probs, spans covering [0, T), per span its proofs."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    proofs: tuple[tuple[bytes, ...], ...]
    stop_reason: StopReason


@dataclass(frozen=True, slots=True)
class SwapReport:
    """What one in-flight weight swap cost."""

    version: int
    pause_seconds: float
    requests_in_flight: int
    prefix_tokens_recomputed: int


class SwapFailed(OurFault):
    """New weights were not loaded, and the engine goes on with those it had: the worker tries again later."""


class Engine(Protocol):
    """Generates with continuous batching; several `generate` calls run at once. `build`: what computes, and its version."""

    @property
    def build(self) -> str: ...

    async def start(self, weights: Weights) -> None:
        """Load the first weights. Raises OurFault with the engine's own words if that fails."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[Progress | Generation]:
        """Yield Progress as tokens come, then exactly one Generation, last. Closing the iterator aborts the request."""
        ...

    async def swap(self, weights: Weights) -> SwapReport:
        """Pause, load `weights` in place, clear the prefix cache, go on: requests in flight get one more span.

        Raises SwapFailed if the engine goes on with the weights it had, OurFault if it doesn't go on.
        """
        ...

    async def close(self) -> None:
        """Stop the engine and free its memory. Safe to call twice."""
        ...


def outside_a_run(folder: Path) -> Weights:
    """A policy folder that is no version of a run: nothing generated with it is handed in."""
    return Weights(0, "sha256:" + "0" * 64, folder)


async def generation_of(engine: Engine, request: GenerationRequest) -> Generation:
    """What a request ends with, its progress passed over."""
    last: Progress | Generation | None = None
    async for event in engine.generate(request):
        last = event
    assert isinstance(last, Generation), "an engine ends with a Generation"
    return last
