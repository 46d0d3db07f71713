"""What a verifier finds about a generation, by one transformers prefill per version: used by the engine tests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from protocol import gumbel, toploc
from worker.engine import Generation, GenerationRequest, Weights


@dataclass(frozen=True)
class SpanFindings:
    """Of one span: exponent mismatches per chunk, log-prob gaps and seed margins per token."""

    mismatches: list[int]
    mantissa_means: list[float]
    logprob_gaps: np.ndarray
    margins: np.ndarray


@cache
def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, tie_word_embeddings=False).eval()


def examine(generation: Generation, request: GenerationRequest, number: int, weights: Weights) -> SpanFindings:
    """Span `number` of the generation under `weights` (which need not be those that it claims)."""
    span, prompt = generation.spans[number], request.prompt_token_ids
    model = load(weights.path)
    with torch.inference_mode():
        tokens = torch.tensor([[*prompt, *generation.token_ids][:-1]])
        hidden_TD = model.model(tokens).last_hidden_state[0, len(prompt) - 1 :][span.start : span.end]
        logits_TV = model.lm_head(hidden_TD).float()
    chosen = np.array(generation.token_ids[span.start : span.end])
    scaled = logits_TV / request.sampling.temperature
    expected = scaled.log_softmax(-1).gather(1, torch.from_numpy(chosen)[:, None])[:, 0].numpy()
    agreements = [
        toploc.compare(proof, rows) for proof, rows in zip(generation.proofs[number], _chunks(hidden_TD), strict=True)
    ]
    return SpanFindings(
        [agreement.exponent_mismatches for agreement in agreements],
        [agreement.mantissa_mean for agreement in agreements],
        np.abs(expected - np.array(generation.logprobs[span.start : span.end])),
        gumbel.margins(
            logits_TV.numpy(),
            seed=request.seed,
            first_position=len(prompt) - 1 + span.start,
            token_ids_T=chosen,
            temperature=request.sampling.temperature,
        ),
    )


def _chunks(hidden_TD: torch.Tensor) -> list[np.ndarray]:
    bits = hidden_TD.view(torch.int16).numpy().view(np.uint16)
    return [bits[start : start + toploc.CHUNK_TOKENS] for start in range(0, len(bits), toploc.CHUNK_TOKENS)]


def assert_honest(findings: list[SpanFindings]) -> None:
    """Far from what other weights, another seed or a misaligned row would show (over 100 mismatches, margins over 1)."""
    mismatches = [number for found in findings for number in found.mismatches]
    margins = np.concatenate([found.margins for found in findings])
    gaps = np.concatenate([found.logprob_gaps for found in findings])
    assert max(mismatches) <= 12, mismatches
    assert (margins == 0).mean() >= 0.95, (margins == 0).mean()
    assert margins.mean() < 0.01, margins.mean()
    assert gaps.mean() < 0.04, gaps.mean()
    assert gaps.max() < 0.5, gaps.max()
