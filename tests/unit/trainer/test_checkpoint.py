"""Checkpoints: exact resume, atomic writing, damaged ones passed over."""

from __future__ import annotations

import json
import random
import resource
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from protocol.errors import OurFault, UserError
from trainer.checkpoint import (
    Checkpoint,
    load_checkpoint,
    load_latest,
    random_state,
    restore_random_state,
    save_checkpoint,
)
from trainer.optim import Optimizer, OptimizerSettings


def simple(step: int) -> Checkpoint:
    weights = {"w": torch.full((2, 3), float(step))}
    return Checkpoint(step, step + 1, weights, {"masters": [None]}, random_state(), {"dropped": {"stale": 3}})


def test_what_is_saved_is_what_is_loaded(tmp_path):
    saved = simple(7)
    save_checkpoint(tmp_path, saved)
    found = load_latest(tmp_path)
    assert found is not None
    loaded, damaged = found
    assert damaged == []
    assert torch.equal(loaded.weights["w"], saved.weights["w"])
    assert (loaded.step, loaded.policy_version, loaded.extra) == (7, 8, {"dropped": {"stale": 3}})
    assert loaded.random_state == saved.random_state


def test_no_checkpoint_is_not_an_error(tmp_path):
    assert load_latest(tmp_path) is None
    assert load_latest(tmp_path / "missing") is None


def test_the_newest_are_kept(tmp_path):
    for step in (1, 2, 10, 11):
        save_checkpoint(tmp_path, simple(step), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-00000010", "checkpoint-00000011"]
    with pytest.raises(UserError, match="keep"):
        save_checkpoint(tmp_path, simple(12), keep=0)


def test_a_damaged_later_one_takes_no_ones_place(tmp_path):
    """The trainer went on from the one before, and saves its step again."""
    save_checkpoint(tmp_path, simple(3), keep=1)
    flip(save_checkpoint(tmp_path, simple(5), keep=1) / "weights.safetensors")
    save_checkpoint(tmp_path, simple(4), keep=1)
    found = load_latest(tmp_path)
    assert found is not None and found[0].step == 4


def edit(folder: Path, **values: object) -> None:
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, **values}))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: flip(folder / "weights.safetensors"),
        lambda folder: flip(folder / "optimizer.pt"),
        lambda folder: (folder / "optimizer.pt").unlink(),
        lambda folder: (folder / "state.json").write_text("{"),
        lambda folder: (folder / "state.json").write_bytes((folder / "state.json").read_bytes()[:-1] + b"\xff"),
        lambda folder: (folder / "state.json").write_text('{"format": 99}'),
        lambda folder: (folder / "state.json").write_text("[" * 100_000),
        lambda folder: edit(folder, policy_version=7),
        lambda folder: edit(folder, step="2"),
        lambda folder: edit(folder, extra=None),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, damage):
    save_checkpoint(tmp_path, simple(1))
    damage(save_checkpoint(tmp_path, simple(2)))
    found = load_latest(tmp_path)
    assert found is not None
    assert found[0].step == 1
    assert "checkpoint-00000002" in found[1][0]


@pytest.mark.parametrize("killed_at", ["checkpoint-00000001", ".checkpoint-00000001.partial"])
def test_a_kill_while_a_step_is_saved_again_leaves_one_of_them(tmp_path, monkeypatch, killed_at):
    """Before the first or between the two renames; then it is saved once more."""
    save_checkpoint(tmp_path, simple(1))
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.name == killed_at:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, replace(simple(1), policy_version=5))
    monkeypatch.undo()
    found = load_latest(tmp_path)
    assert found is not None
    assert (found[0].step, found[0].policy_version, found[1]) == (1, 2, [])
    save_checkpoint(tmp_path, replace(simple(1), policy_version=5))
    found = load_latest(tmp_path)
    assert found is not None
    assert found[0].policy_version == 5
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00000001"]


def test_a_disk_that_is_full_is_said_and_loses_nothing(tmp_path):
    save_checkpoint(tmp_path, simple(1))
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        for parts in ({"weights": {"w": torch.zeros(10**6)}}, {"optimizer": {"m": torch.zeros(10**6)}}):
            with pytest.raises(OurFault, match="free space"):
                save_checkpoint(tmp_path, replace(simple(2), **parts))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    found = load_latest(tmp_path)
    assert found is not None
    assert found[0].step == 1


def test_if_none_is_whole_the_trainer_does_not_start_anew(tmp_path):
    (save_checkpoint(tmp_path, simple(1)) / "state.json").unlink()
    with pytest.raises(UserError, match="no whole checkpoint"):
        load_latest(tmp_path)


def test_a_write_that_was_interrupted_is_invisible_and_replaced(tmp_path):
    partial = tmp_path / ".checkpoint-00000003.partial"
    partial.mkdir(parents=True)
    (partial / "weights.safetensors").write_bytes(b"half")
    assert load_latest(tmp_path) is None
    assert load_checkpoint(save_checkpoint(tmp_path, simple(3))).step == 3
    assert not partial.exists()


def test_generators_go_on_where_they_were():
    state = random_state()
    drawn = (random.random(), float(np.random.rand()), float(torch.rand(())))
    restore_random_state(state)
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == drawn


def test_training_resumed_from_disk_is_bitwise_the_same(tmp_path):
    config = LlamaConfig(vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2)  # fmt: skip

    def fresh():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        return model, Optimizer(model.parameters(), OptimizerSettings(lr=1e-2, warmup_steps=3))

    def train(model, optimizer, steps):
        for _ in range(steps):
            tokens = torch.randint(20, (2, 6))  # drawn from the generator that the checkpoint holds
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()

    model, optimizer = fresh()
    train(model, optimizer, 2)
    save_checkpoint(tmp_path, Checkpoint(2, 2, model.state_dict(), optimizer.state_dict(), random_state()))
    train(model, optimizer, 3)

    resumed, resumed_optimizer = fresh()
    found = load_latest(tmp_path)
    assert found is not None
    resumed.load_state_dict(found[0].weights)
    resumed_optimizer.load_state_dict(found[0].optimizer)
    restore_random_state(found[0].random_state)
    train(resumed, resumed_optimizer, 3)
    for name, value in model.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
