"""Checkpoints in the background: what is written is what was there, in order, and failures are heard."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import trainer.checkpointing as module
from protocol.errors import OurFault
from trainer.checkpoint import Checkpoint, load_latest, random_state, save_checkpoint
from trainer.checkpointing import Checkpointer


def checkpoint(step: int, weight: torch.Tensor) -> Checkpoint:
    return Checkpoint(step, step, {"w": weight}, {"moment": weight}, random_state())


async def test_training_goes_on_while_it_writes_and_what_is_written_is_the_state_of_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, order = threading.Event(), []

    def slow(root: Path, given: Checkpoint, keep: int) -> Path:
        assert may_write.wait(30)
        order.append(f"written {given.step}")
        return save_checkpoint(root, given, keep)

    async def then() -> None:
        order.append("acknowledged")

    monkeypatch.setattr(module, "save_checkpoint", slow)
    writer = Checkpointer(tmp_path, keep=2)
    weight = torch.ones(2)
    await writer.begin(checkpoint(1, weight), then)
    weight += 1.0
    assert order == []
    may_write.set()
    await writer.begin(checkpoint(2, weight), then)
    assert order[:2] == ["written 1", "acknowledged"], "one at a time"
    await writer.finish()
    assert order == ["written 1", "acknowledged", "written 2", "acknowledged"]
    saved, _ = load_latest(tmp_path)
    assert saved.weights["w"].tolist() == [2.0, 2.0]
    first = module.own_copy(checkpoint(1, weight))
    weight += 1.0
    assert first.weights["w"].tolist() == first.optimizer["moment"].tolist() == [2.0, 2.0]


async def test_a_disk_that_refuses_is_heard_and_nothing_is_acknowledged(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    acknowledged = []

    async def then() -> None:
        acknowledged.append(True)

    writer = Checkpointer(tmp_path / "file" / "inside", keep=1)
    await writer.begin(checkpoint(1, torch.ones(1)), then)
    with pytest.raises(OurFault, match="cannot write"):
        await writer.finish()
    assert acknowledged == []
    await writer.begin(checkpoint(1, torch.ones(1)), then)
    await writer.settle()
