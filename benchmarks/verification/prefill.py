"""The verifier's prefill, replay of seeds included, beside a bare transformers forward with LM head on the same tokens.

The bare one pads nothing and repeats every rollout's prompt: [B, prompt + completion] in, logits of all positions out,
in the batch size that serves it best. Both compute in the same precision. Tokens counted are completion tokens.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.tables import bootstrap_median
from coordinator.verification.prefill import PrefillModel
from coordinator.verification.prefill_layout import PrefillItem

_PROMPT = 32
_GROUP = 16
_BATCHES = (4, 8, 16, 32, 64)


def measure(model: PrefillModel, length: int, *, tokens: int, repeats: int) -> dict[str, Any]:
    """Medians of alternating repeats at one completion length; `tokens`: completion tokens per repeat, about."""
    count = max(4, tokens // length)
    items = _items(count, length)
    bare_batch = _best_batch(model, items)
    ours: list[float] = []
    bare: list[float] = []
    for _ in range(repeats):
        ours.append(count * length / _seconds(lambda: model.prefill(items)))
        bare.append(count * length / _seconds(lambda: _bare(model, items, bare_batch)))
    ratios = [mine / theirs for mine, theirs in zip(ours, bare, strict=True)]
    return {
        "completion": length,
        "rollouts": count,
        "verifier_tokens_per_s": median(ours),
        "bare_tokens_per_s": median(bare),
        "bare_batch": bare_batch,
        "ratio": median(ratios),
        "ratio_ci95": list(bootstrap_median(ratios)),
    }


def load(folder: Path, dtype: torch.dtype) -> PrefillModel:
    return PrefillModel(folder, dtype=dtype)


def _items(count: int, length: int) -> list[PrefillItem]:
    draw = random.Random(length)
    items = []
    prompt: tuple[int, ...] = ()
    for number in range(count):
        if number % _GROUP == 0:
            prompt = tuple(draw.randrange(1000, 40_000) for _ in range(_PROMPT))
        completion = tuple(draw.randrange(1000, 40_000) for _ in range(length))
        items.append(PrefillItem(number, prompt, completion, draw.getrandbits(62), 1.0))
    return items


def _best_batch(model: PrefillModel, items: Sequence[PrefillItem]) -> int:
    """The batch size at which the bare forward is fastest."""
    length = len(items[0].completion_token_ids)
    sizes = [size for size in _BATCHES if size <= len(items) and size * (length + _PROMPT) <= 8192] or [1]

    def rate(size: int) -> float:
        return size / _seconds(lambda: _bare(model, items[:size], size))

    for size in sizes[:1]:
        rate(size)  # warm up
    return max(sizes, key=rate)


@torch.inference_mode()
def _bare(model: PrefillModel, items: Sequence[PrefillItem], batch: int) -> None:
    module = model.module
    for start in range(0, len(items), batch):
        rows = [item.prompt_token_ids + item.completion_token_ids for item in items[start : start + batch]]
        module(input_ids=torch.tensor(rows), use_cache=False).logits.sum().item()


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
