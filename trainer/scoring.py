"""Evaluation on held-out tasks: sampling with transformers, pass@k, and the paired difference of two policies.

Shapes: P prompts, N = P · samples sequences, L prompt tokens, V vocabulary.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Difference:
    """A mean (of paired differences after − before, or of plain values) and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


def paired_difference(
    before: Sequence[float], after: Sequence[float], seed: int = 0, resamples: int = 10_000
) -> Difference:
    """How much better `after` is on the same tasks, as `interval` of the differences."""
    if len(before) != len(after) or not before:
        raise ValueError(f"paired scores must be of the same tasks, got {len(before)} and {len(after)}")
    return interval([right - left for left, right in zip(before, after, strict=True)], seed, resamples)


def interval(values: Sequence[float], seed: int = 0, resamples: int = 10_000) -> Difference:
    """The mean with its 95 % interval, by the percentile bootstrap over tasks (the unit is the task).

    Deterministic for a seed. Values that are all the same have an interval of no width.
    """
    if not values:
        raise ValueError("an interval needs at least one value")
    sample = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(values), (resamples, len(values)), generator=generator)
    means = sample[chosen].mean(dim=1).sort().values
    low, high = means[int(0.025 * resamples)], means[min(int(0.975 * resamples), resamples - 1)]
    return Difference(float(sample.mean()), float(low), float(high))


def average_at_n(scores: Sequence[Sequence[float]]) -> float:
    """avg@n: mean score over all n samples of all tasks, each task weighing the same."""
    return statistics.fmean(statistics.fmean(samples) for samples in scores)


def pass_at_k(scores: Sequence[Sequence[float]], k: int) -> float:
    """Unbiased chance that at least one of k samples scores 1, from n ≥ k samples per task. Source: Chen et al. 2021."""
    return statistics.fmean(_pass_at_k(len(samples), sum(score >= 1.0 for score in samples), k) for samples in scores)


def _pass_at_k(n: int, right: int, k: int) -> float:
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples of each task, got {n}")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def generate_completions(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    max_tokens: int,
    eos_token_ids: Sequence[int],
    seed: int = 0,
    samples: int = 1,
    batch_size: int = 64,
) -> list[list[list[int]]]:
    """For each prompt, `samples` completions as token ids, the ending EOS included if one came.

    `temperature` 0 is greedy. Each prompt is prefilled once for all its samples. The draws depend on `seed`, the order
    of the prompts and the batch size. `batch_size` counts prompts.
    """
    generator = torch.Generator().manual_seed(seed)
    eos = torch.tensor(list(eos_token_ids))
    done: dict[int, list[list[int]]] = {}
    # Prompts of similar length go together, so that little is padded.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    was_training = model.training
    model.eval()
    try:
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            drawn = _generate([prompts[i] for i in chosen], model, temperature, max_tokens, eos, generator, samples)
            done.update(zip(chosen, drawn, strict=True))
    finally:
        model.train(was_training)
    return [done[i] for i in range(len(prompts))]


@torch.no_grad()
def _generate(
    prompts: Sequence[Sequence[int]],
    model: Any,
    temperature: float,
    max_tokens: int,
    eos: torch.Tensor,
    generator: torch.Generator,
    samples: int,
) -> list[list[list[int]]]:
    input_PL, seen_PL = _left_padded(prompts)
    position_PL = (seen_PL.cumsum(dim=1) - 1).clamp(min=0)
    output = model(
        input_ids=input_PL, attention_mask=seen_PL, position_ids=position_PL, use_cache=True, logits_to_keep=1
    )
    cache, logits_NV = output.past_key_values, output.logits[:, -1].repeat_interleave(samples, dim=0)
    if samples > 1:
        cache.batch_repeat_interleave(samples)
    seen = seen_PL.repeat_interleave(samples, dim=0)
    tokens: list[torch.Tensor] = []
    ended_N = torch.zeros(len(seen), dtype=torch.bool)
    while True:
        token_N = _draw(logits_NV.float(), temperature, generator)
        tokens.append(torch.where(ended_N, -1, token_N))
        ended_N = ended_N | torch.isin(token_N, eos)
        if len(tokens) == max_tokens or bool(ended_N.all()):
            break
        seen = torch.cat([seen, seen.new_ones(len(seen), 1)], dim=1)
        logits_NV = model(
            input_ids=token_N[:, None],
            attention_mask=seen,
            position_ids=seen.sum(dim=1, keepdim=True) - 1,
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
    rows = [[token for token in row if token >= 0] for row in torch.stack(tokens, dim=1).tolist()]
    return [rows[i : i + samples] for i in range(0, len(rows), samples)]


def _left_padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(prompt) for prompt in prompts)
    tokens = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    seen = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(tokens), torch.tensor(seen)


def _draw(logits_NV: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    if temperature == 0.0:
        return logits_NV.argmax(dim=-1)
    probabilities = torch.softmax(logits_NV / temperature, dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
