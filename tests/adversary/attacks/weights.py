"""Cheats by weights: another model, or a cheaper copy of the right one, generates; the published version is claimed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.adversary.attacks.cheat import Cheat
from worker.engine import Weights

Tensor = Any  # torch is heavy, and imported only where tensors are


class OtherWeights(Cheat):
    """Loads a copy of each version with every tensor changed by `change(name, tensor, generator)`."""

    def __init__(self, change: Callable[[str, Tensor, Any], Tensor], seed: int = 0) -> None:
        self._change = change
        self._seed = seed

    def weights(self, published: Weights, scratch: Path) -> Weights:
        return replace(published, path=altered_copy(published.path, scratch, self._change, self._seed))


class StaleWeights(Cheat):
    """Keeps the first version that it got, and claims each newer one: saves itself the downloads."""

    def __init__(self) -> None:
        self._first: Weights | None = None

    def weights(self, published: Weights, scratch: Path) -> Weights:
        self._first = self._first or published
        return replace(published, path=self._first.path)


class Fp8Cache(Cheat):
    """Right weights, and keys and values rounded to fp8 (e4m3) before they are kept."""

    def alters_module(self, module: Any) -> None:  # type: ignore[override]
        for name, layer in module.named_modules():
            if name.endswith(("k_proj", "v_proj")):
                layer.register_forward_hook(_to_fp8_and_back)


def other_model() -> Cheat:
    """A model of the same shape and spread, that agrees in nothing."""
    return OtherWeights(lambda _, t, g: t.float().mean() + t.float().std(correction=0) * _normal(t, g))


def random_init() -> Cheat:
    """Weights as a library initializes them: nothing was ever trained or downloaded."""
    return OtherWeights(lambda _, t, g: 0.02 * _normal(t, g) if t.ndim > 1 else t.float() * 0 + 1)


def noise(share: float) -> Cheat:
    """Each weight off by a normal share of itself."""
    return OtherWeights(lambda _, t, g: t.float() * (1 + share * _normal(t, g)), seed=5)


def rounded(bits: int) -> Cheat:
    """Linear layers as integers of that many bits with one scale per output channel; embeddings and head untouched."""
    return OtherWeights(lambda name, t, _: _round_rows(t, bits) if t.ndim > 1 and ".layers." in name else t)


def altered_copy(folder: Path, scratch: Path, change: Callable[[str, Tensor, Any], Tensor], seed: int) -> Path:
    """A copy of a model folder with every tensor changed; the same for the same seed."""
    import torch
    from safetensors.torch import load_file, save_file

    target = Path(tempfile.mkdtemp(dir=scratch))
    generator = torch.Generator().manual_seed(seed)
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            shutil.copyfile(file, target / file.name)
            continue
        state = {name: change(name, t, generator).to(t.dtype) for name, t in sorted(load_file(file).items())}
        save_file(state, target / file.name, metadata={"format": "pt"})
    return target


def _to_fp8_and_back(_module: Any, _inputs: object, output: Tensor) -> Tensor:
    import torch

    return output.to(torch.float8_e4m3fn).to(output.dtype)


def _normal(tensor: Tensor, generator: Any) -> Tensor:
    import torch

    return torch.randn(tensor.shape, generator=generator)


def _round_rows(tensor: Tensor, bits: int) -> Tensor:
    scale = tensor.float().abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (tensor.float() / scale).round() * scale
