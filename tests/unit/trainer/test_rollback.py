"""Going back to a checkpoint under numbers never used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import trainer.rollback as module
from coordinator import trainer_token
from coordinator.client import Withdrawn
from protocol.errors import UserError
from trainer.checkpoint import Checkpoint, checkpoints, load_latest, random_state, save_checkpoint
from trainer.rollback import go_back, newest_up_to


def save(root: Path, step: int, version: int, unpublished: int = 0) -> None:
    weights = {"w": torch.full((2,), float(version))}
    extra = {"unpublished": unpublished}
    save_checkpoint(root, Checkpoint(step, version, weights, {"steps": step}, random_state(), extra), keep=9)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (2, 4, 6):
        save(tmp_path, step, step)
    return tmp_path


def test_the_newest_checkpoint_up_to_the_version_is_taken(root: Path) -> None:
    assert newest_up_to(root, 5).policy_version == 4
    assert newest_up_to(root, 4).policy_version == 4
    with pytest.raises(UserError, match="there: up to 6, 4, 2"):
        newest_up_to(root, 1)


def test_a_damaged_one_is_passed_over(root: Path) -> None:
    (root / "checkpoint-00000004" / "weights.safetensors").write_bytes(b"")
    assert newest_up_to(root, 5).policy_version == 2


def test_the_run_goes_on_with_old_weights_under_new_numbers(root: Path) -> None:
    for _ in range(2):  # also when it is repeated after a crash
        go_back(root, newest_up_to(root, 4), version=7, batch=6, keep=2)
        checkpoint, damaged = load_latest(root)
        assert (checkpoint.step, checkpoint.policy_version, damaged) == (6, 7, [])
        assert checkpoint.weights["w"].tolist() == [4.0, 4.0]
        assert checkpoint.optimizer == {"steps": 4}
        assert [folder.name for folder in checkpoints(root)] == ["checkpoint-00000006", "checkpoint-00000004"]


@pytest.mark.parametrize(("version", "step"), [(1, 3), (2, 5), (3, 6)])
def test_steps_after_a_version_are_the_next_ones(tmp_path: Path, version: int, step: int) -> None:
    """Two steps make a version, and each is saved: 3 = version 1, 4 = version 1 and a step, 5 = version 2, 6 = and a step."""
    for saved, of, more in [(3, 1, 0), (4, 1, 1), (5, 2, 0), (6, 2, 1), (7, 3, 1)]:
        save(tmp_path, saved, of, more)
    chosen = newest_up_to(tmp_path, version)
    assert chosen.step == step
    go_back(tmp_path, chosen, version=9, batch=8, keep=9)
    kept = [int(folder.name.removeprefix("checkpoint-")) for folder in checkpoints(tmp_path)]
    assert kept == [8, *range(chosen.step, 2, -1)], "what was made after it is gone"
    going_on, _ = load_latest(tmp_path)
    assert going_on.extra["unpublished"] == 0, "these weights are to be published as they are"


class Client:
    """Stands for the coordinator, whose own side is in tests/unit/coordinator/test_client.py."""

    def __init__(self, endpoint: str, token: str, ca: Path | None) -> None:
        self.closed = False

    async def withdraw(self, kept_version: int) -> Withdrawn:
        if kept_version == 5:
            raise UserError("version 5 is not published")
        return Withdrawn(next_version=7, next_batch=6, withdrawn=2, purged=3)

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def config(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "TrainerClient", Client)
    trainer_token.load_or_create(root / "trainer.token")
    path = root / "run.toml"
    path.write_text('[model]\npath = "model"\n[trainer]\ncheckpoints = "."\n')
    return path


async def test_it_says_what_was_done(config: Path, root: Path) -> None:
    said = await module.run_rollback(config, 4)
    assert "2 versions are withdrawn and 3 rollouts purged" in said
    assert "weights of version 4 as version 7" in said
    checkpoint, _ = load_latest(root)
    assert (checkpoint.step, checkpoint.policy_version) == (6, 7)


@pytest.mark.parametrize("version", [1, 5])
async def test_what_is_refused_changes_nothing(config: Path, root: Path, version: int) -> None:
    before = [folder.name for folder in checkpoints(root)]
    with pytest.raises(UserError):
        await module.run_rollback(config, version)
    assert [folder.name for folder in checkpoints(root)] == before
