"""Building and checking activation proofs on this CPU, for whole chunks of 32 tokens.

Where the published library (`toploc`) can be imported, it does the same in turn with ours. Its wheels fit an older torch;
for this one it has to be built from source.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from protocol import toploc
from worker.vllm_engine.capture_store import top_k_of_chunks

_CHUNKS = 64
_REPEATS = 15
_LIBRARY_OPTIONS = {"decode_batching_size": toploc.CHUNK_TOKENS, "topk": toploc.TOP_K, "skip_prefill": True}


def measure(hidden_size: int) -> dict[str, Any]:
    """Milliseconds per token to build (top k as the engine takes it, then the polynomial) and to check; ours, the
    library's if it is there, and the medians of the paired ratios.
    """
    bits = _activations(hidden_size)
    hidden = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).reshape(_CHUNKS, -1)
    proofs = _build(hidden)
    chunks = list(bits.reshape(_CHUNKS, toploc.CHUNK_TOKENS, hidden_size))
    library_build, library_check = _library(bits) or (None, None)
    timed = _timed("build", lambda: _build(hidden), library_build)
    timed |= _timed("check", lambda: toploc.compare_many(proofs, chunks), library_check)
    agreement = toploc.compare(proofs[0], chunks[0])
    assert agreement.exponent_mismatches == 0 and agreement.mantissa_mean == 0.0
    return {
        "hidden_size": hidden_size,
        **timed,
        "bytes_per_token": toploc.proof_bytes(toploc.TOP_K) / toploc.CHUNK_TOKENS,
    }


def _build(hidden_CN: torch.Tensor) -> tuple[bytes, ...]:
    found = top_k_of_chunks(hidden_CN, toploc.TOP_K)
    indices = np.stack([np.frombuffer(chunk.indices, dtype=np.int32) for chunk in found])
    return toploc.encode_many(indices, np.stack([np.frombuffer(chunk.bits, dtype=np.uint16) for chunk in found]))


def _activations(hidden_size: int) -> np.ndarray:
    draw = np.random.default_rng(0).standard_t(4, size=(_CHUNKS * toploc.CHUNK_TOKENS, hidden_size)).astype(np.float32)
    return (draw.view(np.uint32) >> 16).astype(np.uint16)


def _library(bits: np.ndarray) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    """How the published library builds and checks, if it is there."""
    try:
        library: Any = importlib.import_module("toploc")
    except ImportError:
        return None
    # It takes a list: each token's hidden state.
    rows = list(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16))
    build = partial(library.build_proofs_bytes, rows, **_LIBRARY_OPTIONS)
    return build, partial(library.verify_proofs_bytes, rows, build(), **_LIBRARY_OPTIONS)


def _timed(name: str, ours: Callable[[], Any], library: Callable[[], Any] | None) -> dict[str, float]:
    """Milliseconds per token, in turn."""
    mine, theirs = [], []
    for _ in range(_REPEATS):
        mine.append(_ms_per_token(ours))
        if library is not None:
            theirs.append(_ms_per_token(library))
    found = {f"{name}_ms_per_token": median(mine)}
    if theirs:
        found[f"library_{name}_ms_per_token"] = median(theirs)
        found[f"{name}_ratio"] = median(own / other for own, other in zip(mine, theirs, strict=True))
    return found


def _ms_per_token(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return (time.perf_counter() - begun) * 1e3 / (_CHUNKS * toploc.CHUNK_TOKENS)
