"""Two consecutive versions of real weights: SmolLM2-135M-Instruct's in bf16, and one simulated Adam step later.

Cut evenly from all of the model to the size that is wanted (a larger size repeats it), without the head that is tied to the
embeddings, so that no bytes come twice. For the step, float32 masters are drawn that round to the weights, and moved by
the learning rate times a normal number, as Adam's normalized steps do; most bf16 values don't change, and those that do
move by one unit in the last place. `python -m benchmarks.delta` measures the same on a real training.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from protocol.errors import UserError

LEARNING_RATE = 1e-6
MODEL = Path(".cache/models/smollm2-135m-instruct/model.safetensors")
_TIED = "lm_head.weight"
_SLICES = 512  # of the model: of each the same share is taken
_BLOCK = 2**20  # weights at a time
_NAME = "model.safetensors"


def make_pair(before: Path, after: Path, size: int, seed: int = 0, model: Path = MODEL) -> None:
    """Fill two folders with one safetensors file of about `size` bytes each. Raises UserError if the model isn't here."""
    count = size // 2 - 256  # room for the header
    header = json.dumps({"weight": {"dtype": "BF16", "shape": [count], "data_offsets": [0, 2 * count]}}).encode()
    header = header.ljust(-(-len(header) // 8) * 8)
    weights = _cut(_weights(model), count)
    rng = np.random.default_rng(seed)
    for folder in (before, after):
        folder.mkdir(parents=True)
    with (before / _NAME).open("wb") as old, (after / _NAME).open("wb") as new:
        for file in (old, new):
            file.write(len(header).to_bytes(8, "little") + header)
        for start in range(0, count, _BLOCK):
            words = weights[start : start + _BLOCK]
            steps = rng.standard_normal(len(words), dtype=np.float32) * np.float32(LEARNING_RATE)
            old.write(words.tobytes())
            new.write(_bf16(_masters(words, rng) + steps).tobytes())


def _weights(model: Path) -> np.ndarray:
    """All of the model's numbers, as words, but for those of the tied head."""
    if not model.is_file():
        raise UserError(f"{model} is not here: `make demo` makes it")
    with model.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    data = np.memmap(model, np.uint8, "r", offset=8 + length)
    places = sorted(entry["data_offsets"] for name, entry in header.items() if name not in (_TIED, "__metadata__"))
    return np.concatenate([data[begin:end] for begin, end in places]).view(np.uint16)


def _cut(weights: np.ndarray, count: int) -> np.ndarray:
    """`count` words: of each slice of the model as many."""
    if count >= len(weights):
        return np.resize(weights, count)
    edges = np.linspace(0, len(weights), _SLICES + 1).astype(int)
    sizes = np.diff(np.linspace(0, count, _SLICES + 1).astype(int))
    return np.concatenate([weights[edge : edge + size] for edge, size in zip(edges, sizes, strict=False)])


def _masters(words: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Float32 numbers that round to these words, anywhere between the halfway points to their neighbours."""
    within = rng.integers(-0x7FFF, 0x8000, len(words), dtype=np.int64)
    bits = np.maximum((words & 0x7FFF).astype(np.int64) * 2**16 + within, 0)
    return (bits | (words & 0x8000).astype(np.int64) << 16).astype(np.uint32).view(np.float32)


def _bf16(values: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even; the bits as uint16."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
