"""Two processes under torchrun (FSDP2 on gloo) train as one does, and either goes on from the other's checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tiny_model import build_tiny_model
from trainer.checkpoint import load_latest

MEMBER = Path(__file__).with_name("fsdp_member.py")
ROOT = Path(__file__).parents[2]


def train(size: int, model: Path, out: Path, steps: int, resume: Path | None = None) -> Path:
    out.mkdir()
    launcher = [] if size == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    arguments = [str(model), str(out), str(steps), *([str(resume)] if resume else [])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, *launcher, str(MEMBER), *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=390, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def weights(out: Path) -> dict[str, torch.Tensor]:
    found = load_latest(out)
    assert found is not None
    return found[0].weights


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("fsdp")
    model = build_tiny_model(folder / "model")
    one = train(1, model, folder / "one", 3)
    two = train(2, model, folder / "two", 3)
    return {
        "model": model,
        "one": one,
        "two": two,
        "one after two": train(1, model, folder / "third", 2, two),
        "two after one": train(2, model, folder / "fourth", 2, one),
        "one after one": train(1, model, folder / "fifth", 2, one),
    }


@pytest.mark.parametrize(
    ("left", "right"), [("one", "two"), ("one after one", "one after two"), ("one after one", "two after one")]
)
def test_the_number_of_processes_changes_nothing(runs: dict[str, Path], left: str, right: str) -> None:
    ours, theirs = weights(runs[left]), weights(runs[right])
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-5
    numbers, others = (json.loads((runs[name] / "numbers.json").read_text()) for name in (left, right))
    for name in numbers.keys() - {"step_seconds"}:
        assert numbers[name] == pytest.approx(others[name], rel=1e-3, abs=1e-5), name


def test_it_did_train(runs: dict[str, Path]) -> None:
    before, after = weights(runs["one"]), weights(runs["one after one"])
    assert max(float((before[name] - after[name]).abs().max()) for name in before) > 1e-3
