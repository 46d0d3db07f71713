"""What trains is what is published: the policy of a version, loaded by anyone, computes what the trainer computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_model import build_tiny_model
from tests.unit.trainer.test_batching import completions
from tests.unit.trainer.test_loop import make_group
from trainer.batching import pack
from trainer.config import TrainerConfig, TrainerRun
from trainer.crew import Crew, load_model
from trainer.logprobs import score


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose weights are finer than a version's, as one in float32 may have them."""
    folder = tmp_path / "model"
    build_tiny_model(folder)
    weights = {name: tensor.float() * 1.0007 for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "settings",
    [{}, {"dtype": "bfloat16"}, {"lora_rank": 3}, {"optimizer": "muon"}],
    ids=["float32", "bfloat16", "lora", "muon"],
)
def test_a_published_version_computes_what_is_trained(model: Path, settings: dict[str, Any]) -> None:
    config = TrainerConfig(learning_rate=3e-4, threads=1, **settings)
    crew = Crew(TrainerRun(model_path=model, trainer=config), 1.0)
    batch = pack(completions(), token_budget=10_000)[0]
    start = crew.weights()
    for step in range(3):
        assert _difference(crew, model, batch, config.dtype) < (0.05 if config.dtype == "bfloat16" else 1e-5)
        result = crew.step([make_group(step, number) for number in range(2)], step)
        assert result.report is not None
        assert result.report.applied
    assert any(not torch.equal(start[name], tensor) for name, tensor in crew.weights().items())


def _difference(crew: Crew, model: Path, batch: Any, dtype: str) -> float:
    """The largest, in nats, between the trainer's policy and the version that it publishes."""
    published = load_model(model, dtype, "cpu")
    published.load_state_dict(crew.weights(), strict=False)
    theirs = score(published, batch, 1.0).logprob_BT
    return float((score(crew.model, batch, 1.0).logprob_BT - theirs).detach().abs().max())
