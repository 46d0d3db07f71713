"""Two processes under torchrun (FSDP2 on gloo) train as one does, and either goes on from the other's checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.fsdp_member import MORE, STEPS, make_crew, resume, train
from tests.tiny_model import build_tiny_model
from trainer.checkpoint import load_latest
from trainer.team import Team

MEMBER = Path(__file__).with_name("fsdp_member.py")
ROOT = Path(__file__).parents[2]
PATIENCE_S = 600


def run_team(model: Path, out: Path, checkpoints: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(MEMBER), str(model), str(out), str(checkpoints)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fsdp")
    model = build_tiny_model(out / "model")
    train(make_crew(model, Team()), 0, STEPS, out / "one")
    for source in ("one", "team"):
        if source == "team":
            run_team(model, out, out / "one")
        crew = make_crew(model, Team())
        train(crew, resume(crew, out / source), MORE, out / f"one-after-{source}")
    return out


def weights(out: Path) -> dict[str, torch.Tensor]:
    found = load_latest(out)
    assert found is not None
    return found[0].weights


@pytest.mark.timeout(PATIENCE_S + 300)
@pytest.mark.parametrize(
    ("left", "right"), [("one", "team"), ("one-after-one", "one-after-team"), ("one-after-one", "team-after-one")]
)
def test_the_number_of_processes_changes_nothing(out: Path, left: str, right: str) -> None:
    ours, theirs = weights(out / left), weights(out / right)
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-5
    numbers, others = (json.loads((out / name / "numbers.json").read_text()) for name in (left, right))
    for name in numbers.keys() - {"step_seconds"}:
        assert numbers[name] == pytest.approx(others[name], rel=1e-3, abs=1e-5), name


@pytest.mark.timeout(PATIENCE_S + 300)
def test_it_did_train(out: Path) -> None:
    before, after = weights(out / "one"), weights(out / "one-after-one")
    assert max(float((before[name] - after[name]).abs().max()) for name in before) > 1e-4
