"""Two versions of a tiny model that agree in nothing, and the trusted models that judge claims of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.verification.resident import ResidentModels
from tests.tiny_model import build_other_tiny_model, build_tiny_model
from worker.engine import Weights


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Version 0."""
    return Weights(0, f"sha256:{0:064x}", build_other_tiny_model(tmp_path_factory.mktemp("older") / "model"))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Version 1, the newest."""
    return Weights(1, f"sha256:{1:064x}", build_tiny_model(tmp_path_factory.mktemp("published") / "model"))


@pytest.fixture(scope="module")
def models(older: Weights, published: Weights) -> ResidentModels:
    folders: dict[str, Path] = {weights.manifest_digest: weights.path for weights in (older, published)}
    return ResidentModels(folders.__getitem__, max_resident=2)


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors here are so small that a second thread only waits; on a busy machine it waits long."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
