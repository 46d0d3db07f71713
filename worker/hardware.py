"""What this machine is, in words for the operator, and what arithmetic suits it."""

from __future__ import annotations

import os
import platform
import subprocess

_FEW, _MANY = 8, 64
_TOKENS_OF_PROOFS = (2 << 30) // (8 << 10)


def describe() -> str:
    """The GPUs as the driver names them, else processor and cores; at most 128 characters."""
    names = _gpus()
    if not names:
        return f"{_processor()}, {os.cpu_count()} cores"[:128]
    return ", ".join(f"{names.count(name)}× {name}" for name in dict.fromkeys(names))[:128]


def devices() -> tuple[str, ...]:
    """The kinds of device that the engine computes on, for the hardware class."""
    return tuple(_gpus()) or (_processor(),)


def _processor() -> str:
    return f"{platform.machine()} CPU"


def _gpus() -> list[str]:
    """As the driver names them; none without one."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        return []
    return [name.strip() for name in listed if name.strip()]


def native_dtype() -> str:
    """The dtype to compute in: bfloat16 where there is a GPU or a CPU with bf16 units, else float32.

    The weights are bf16 either way, and float32 only rounds less. On a CPU that emulates bf16 it is several times faster
    (measured for SmolLM2 on AVX2: 15 against 92 GFLOP/s in matrix products).
    """
    import torch

    if torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return "bfloat16"
    return "float32"


def default_concurrency(longest: int) -> int:
    """Samples at once of up to so many tokens: 8 on a CPU. On a GPU, where each more costs little, 64 or as many as the memory
    for proofs holds to their end, if each token has 8 KiB (bf16 of a hidden size of 4096); at least 8."""
    if not _gpus():
        return _FEW
    return min(_MANY, max(_FEW, _TOKENS_OF_PROOFS // longest))


def default_kv_cache_gib() -> float | None:
    """None on a GPU, where vLLM takes what its weights leave; 2 on a CPU, where it would take most of the machine's memory."""
    import torch

    return None if torch.cuda.is_available() else 2.0


def default_enforce_eager() -> bool:
    """Whether to run the model as it is: on a CPU, where compiling it delays the first rollout by minutes."""
    import torch

    return not torch.cuda.is_available()
