"""The definition of what is right: generation with transformers, one forward pass at a time, in a thread.

Every token is the protocol's seeded choice from float32 logits, every log-prob that of the distribution sampled from,
every proof built from the hidden states that chose the tokens. Slow; it serves tests, and is never the worker's default.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np

from protocol import gumbel, toploc
from protocol.errors import OurFault, UserError
from protocol.rollout import StopReason, VersionSpan
from worker.engine import Generation, GenerationRequest, Progress, SwapFailed, SwapReport, Weights

Choose = Callable[
    ..., np.ndarray
]  # as gumbel.select_batch: logits_BV, seeds_B, positions_B, temperatures_B -> tokens_B


@dataclass(slots=True)
class _Sequence:
    """One request's state. `cache` holds keys and values of `cached` tokens, computed by `weights` alone."""

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    hidden_bits: list[np.ndarray] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    weights: Weights | None = None
    cache: Any = None

    @property
    def prefix(self) -> list[int]:
        return [*self.request.prompt_token_ids, *self.tokens]

    @property
    def stop_reason(self) -> StopReason | None:
        if self.tokens and self.tokens[-1] in self.request.sampling.eos_token_ids:
            return StopReason.EOS
        return StopReason.LENGTH if len(self.tokens) >= self.request.sampling.max_tokens else None

    def extend(self, weights: Weights, token: int, logprob: float, hidden_bits: np.ndarray) -> None:
        start = len(self.tokens)
        if self.spans and self.spans[-1].version == weights.version:
            start = self.spans.pop().start
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.hidden_bits.append(hidden_bits)
        self.spans.append(VersionSpan(weights.version, weights.manifest_digest, start, len(self.tokens)))

    def generation(self, stop_reason: StopReason) -> Generation:
        hidden_TD = np.stack(self.hidden_bits)
        proofs = tuple(toploc.build_proofs(hidden_TD[span.start : span.end]) for span in self.spans)
        return Generation(tuple(self.tokens), tuple(self.logprobs), tuple(self.spans), proofs, stop_reason)


class ReferenceEngine:
    """Implements worker.engine.Engine. Requests take turns, token by token; a swap takes its turn between two tokens.

    `choose`: the rule that picks a token; any other than the protocol's is what a verifier must notice.
    """

    def __init__(self, dtype: str = "bfloat16", choose: Choose = gumbel.select_batch) -> None:
        self._dtype = dtype
        self._choose = choose
        self._model: Any = None
        self._weights: Weights | None = None
        self._turn = asyncio.Lock()
        self._active: list[_Sequence] = []

    @property
    def build(self) -> str:
        """See worker.engine.Engine."""
        return f"transformers {version('transformers')}"

    async def start(self, weights: Weights) -> None:
        """See worker.engine.Engine."""
        self._model, self._weights = await self._load(weights), weights

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Progress | Generation]:
        """See worker.engine.Engine."""
        if not request.prompt_token_ids:
            raise UserError("the prompt has no tokens")
        sequence = _Sequence(request)
        self._active.append(sequence)
        try:
            while (stop_reason := sequence.stop_reason) is None:
                async with self._turn:
                    model, weights = self._running()
                    await asyncio.to_thread(_advance, model, weights, sequence, self._choose)
                if sequence.stop_reason is None:
                    yield Progress(tuple(sequence.tokens))
            yield await asyncio.to_thread(sequence.generation, stop_reason)
        finally:
            self._active.remove(sequence)

    async def swap(self, weights: Weights) -> SwapReport:
        """See worker.engine.Engine."""
        self._running()
        started = time.monotonic()
        async with self._turn:
            try:
                model = await self._load(weights)
            except OurFault as error:
                raise SwapFailed(str(error)) from error
            self._model, self._weights = model, weights
            prefix = sum(len(sequence.prefix) for sequence in self._active if sequence.cache is not None)
            return SwapReport(weights.version, time.monotonic() - started, len(self._active), prefix)

    async def close(self) -> None:
        """See worker.engine.Engine."""
        self._model = self._weights = None

    async def _load(self, weights: Weights) -> Any:
        try:
            return await asyncio.to_thread(_load_model, weights, self._dtype)
        except (OSError, ValueError, RuntimeError) as error:
            raise OurFault(f"version {weights.version} at {weights.path} cannot be loaded: {error}") from error

    def _running(self) -> tuple[Any, Weights]:
        if self._model is None or self._weights is None:
            raise OurFault("the engine is not started")
        return self._model, self._weights


def _load_model(weights: Weights, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    # A tied config would drop an explicit lm_head.weight, which is what was published.
    options = {"dtype": getattr(torch, dtype), "tie_word_embeddings": False, "use_safetensors": True}
    return AutoModelForCausalLM.from_pretrained(weights.path, local_files_only=True, **options).eval()


def _advance(model: Any, weights: Weights, sequence: _Sequence, choose: Choose) -> None:
    """Add one token. After a swap the cache is dropped, so that a span depends on that span's weights alone."""
    import torch

    if sequence.weights is not weights:
        sequence.cache, sequence.weights = None, weights
    prefix = sequence.prefix
    fresh = prefix if sequence.cache is None else prefix[-1:]
    with torch.inference_mode():
        output = model.model(torch.tensor([fresh]), past_key_values=sequence.cache, use_cache=True)
        hidden_D = output.last_hidden_state[0, -1]
        logits_V = model.lm_head(hidden_D).float()
    sequence.cache = output.past_key_values
    request = sequence.request
    temperature = request.sampling.temperature
    token = int(choose(logits_V.numpy()[None], [request.seed], [len(prefix) - 1], [temperature])[0])
    logprob = float((logits_V / temperature).log_softmax(dim=-1)[token])
    bits_D = hidden_D.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).copy()
    sequence.extend(weights, token, logprob, bits_D)
