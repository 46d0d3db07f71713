"""Two processes under torchrun (FSDP2 on gloo) train as one does, and either goes on from the other's checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.fsdp_member import MORE, STEPS, WAYS, make_crew, resume, train
from tests.tiny_model import build_tiny_model
from trainer.checkpoint import Checkpoint, load_latest
from trainer.precision import as_published
from trainer.team import Team

MEMBER = Path(__file__).with_name("fsdp_member.py")
ROOT = Path(__file__).parents[2]
PATIENCE_S = 600
# Sums in another order differ in their last bits. Adam makes up to a whole step of that where a gradient is nearly nothing
# (with a critic: 3 of a million numbers), and Muon's orthogonal step spreads it over a matrix: no bound holds for each
# number there, but all together (root mean square) they stay within a tenth of a step.
SPREAD = ("critic", "muon")


def run_team(model: Path, out: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(MEMBER), str(model), str(out)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything trained: <by whom>[-after-<by whom>]-<way>."""
    out = tmp_path_factory.mktemp("fsdp")
    model = build_tiny_model(out / "model")
    for way in WAYS:
        train(make_crew(model, Team(), way), 0, STEPS, out / f"one-{way}")
    run_team(model, out)
    for way in WAYS:
        for source in ("one", "team"):
            crew = make_crew(model, Team(), way)
            train(crew, resume(crew, out / f"{source}-{way}"), MORE, out / f"one-after-{source}-{way}")
    return out


def saved(out: Path) -> Checkpoint:
    found = load_latest(out)
    assert found is not None
    return found[0]


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a tree, by where they are."""
    if isinstance(value, torch.Tensor):
        yield name, value.float()
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors(item, f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from tensors(item, f"{name}/{place}")


def furthest(left: Any, right: Any) -> float:
    """The largest difference of any number in two trees of the same form."""
    ours, theirs = dict(tensors(left)), dict(tensors(right))
    assert ours.keys() == theirs.keys()
    return max((float((ours[name] - theirs[name]).abs().max()) for name in ours), default=0.0)


def root_mean_square(left: Any, right: Any) -> float:
    """That of the differences of all numbers in two trees of the same form."""
    ours, theirs = dict(tensors(left)), dict(tensors(right))
    assert ours.keys() == theirs.keys()
    differences = torch.cat([(ours[name] - theirs[name]).flatten() for name in ours])
    return float(differences.square().mean().sqrt())


@pytest.mark.timeout(PATIENCE_S + 600)
@pytest.mark.parametrize(
    ("left", "right"), [("one", "team"), ("one-after-one", "one-after-team"), ("one-after-one", "team-after-one")]
)
@pytest.mark.parametrize("way", WAYS)
def test_the_number_of_processes_changes_nothing(out: Path, way: str, left: str, right: str) -> None:
    ours, theirs = saved(out / f"{left}-{way}"), saved(out / f"{right}-{way}")
    far = root_mean_square if way in SPREAD else furthest
    masters, other_masters = ours.optimizer["masters"], theirs.optimizer["masters"]
    assert far(masters, other_masters) < 1e-5
    # The weights are these rounded: where two masters lie on either side of a border, a whole unit of bfloat16 apart.
    assert ours.weights.keys() == theirs.weights.keys()
    for checkpoint in (ours, theirs):
        held = list(checkpoint.weights.values())
        for master in checkpoint.optimizer["masters"]:
            assert any(torch.equal(as_published(master), weight) for weight in held)
    assert furthest(ours.companions, theirs.companions) < 1e-4
    assert bool(ours.companions) == (way in ("critic", "ewma"))
    numbers, others = (json.loads((out / f"{name}-{way}" / "numbers.json").read_text()) for name in (left, right))
    for name in numbers.keys() - {"step_seconds"}:
        assert numbers[name] == pytest.approx(others[name], rel=1e-3, abs=1e-5), name


@pytest.mark.timeout(PATIENCE_S + 600)
@pytest.mark.parametrize("way", WAYS)
def test_it_did_train(out: Path, way: str) -> None:
    before, after = saved(out / f"one-{way}"), saved(out / f"one-after-one-{way}")
    assert furthest(before.weights, after.weights) > 1e-4
