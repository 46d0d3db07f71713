"""Two consecutive versions of made-up weights: bf16, and one simulated Adam step apart.

Weights are normal with a deviation of 0.02, and the step moves every float32 master weight by the learning rate times a
normal number, as Adam's normalized steps do; most bf16 values don't change, and those that do move by one unit in the
last place. `python -m benchmarks.delta` measures the same on a real training.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

LEARNING_RATE = 1e-6
_DEVIATION = 0.02
_BLOCK = 2**20  # weights at a time
_NAME = "model.safetensors"


def make_pair(before: Path, after: Path, size: int, seed: int = 0) -> None:
    """Fill two folders with one safetensors file of about `size` bytes each."""
    count = size // 2 - 256  # room for the header
    header = json.dumps({"weight": {"dtype": "BF16", "shape": [count], "data_offsets": [0, 2 * count]}}).encode()
    header = header.ljust(-(-len(header) // 8) * 8)
    rng = np.random.default_rng(seed)
    for folder in (before, after):
        folder.mkdir(parents=True)
    with (before / _NAME).open("wb") as old, (after / _NAME).open("wb") as new:
        for file in (old, new):
            file.write(len(header).to_bytes(8, "little") + header)
        for start in range(0, count, _BLOCK):
            length = min(_BLOCK, count - start)
            masters = rng.standard_normal(length, dtype=np.float32) * np.float32(_DEVIATION)
            steps = rng.standard_normal(length, dtype=np.float32) * np.float32(LEARNING_RATE)
            old.write(_bf16(masters).tobytes())
            new.write(_bf16(masters + steps).tobytes())


def _bf16(values: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even; the bits as uint16."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
