"""Building and checking activation proofs on this CPU, for whole chunks of 32 tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from protocol import toploc
from worker.vllm_engine.capture_store import top_k_of_chunks

# The reference library's own path, as measured on a CPU at d = 1024: milliseconds per token to build a proof.
REFERENCE_BUILD_MS_PER_TOKEN = 0.05
_CHUNKS = 64
_REPEATS = 15


def measure(hidden_size: int) -> dict[str, Any]:
    """Milliseconds per token to build (top k as the engine takes it, then the polynomial) and to check."""
    bits = _activations(hidden_size)
    hidden = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).reshape(_CHUNKS, -1)
    proofs = _build(hidden)
    chunks = bits.reshape(_CHUNKS, toploc.CHUNK_TOKENS, hidden_size)
    tokens = _CHUNKS * toploc.CHUNK_TOKENS
    build = _median_seconds(lambda: _build(hidden))
    check = _median_seconds(lambda: [toploc.compare(p, c) for p, c in zip(proofs, chunks, strict=True)])
    agreement = toploc.compare(proofs[0], chunks[0])
    assert agreement.exponent_mismatches == 0 and agreement.mantissa_mean == 0.0
    return {
        "hidden_size": hidden_size,
        "build_ms_per_token": build / tokens * 1e3,
        "check_ms_per_token": check / tokens * 1e3,
        "bytes_per_token": toploc.proof_bytes(toploc.TOP_K) / toploc.CHUNK_TOKENS,
        "reference_build_ms_per_token": REFERENCE_BUILD_MS_PER_TOKEN,
    }


def _build(hidden_CN: torch.Tensor) -> tuple[bytes, ...]:
    found = top_k_of_chunks(hidden_CN, toploc.TOP_K)
    indices = np.stack([np.frombuffer(chunk.indices, dtype=np.int32) for chunk in found])
    return toploc.encode_many(indices, np.stack([np.frombuffer(chunk.bits, dtype=np.uint16) for chunk in found]))


def _activations(hidden_size: int) -> np.ndarray:
    draw = np.random.default_rng(0).standard_t(4, size=(_CHUNKS * toploc.CHUNK_TOKENS, hidden_size)).astype(np.float32)
    return (draw.view(np.uint32) >> 16).astype(np.uint16)


def _median_seconds(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_REPEATS):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return median(seconds)
