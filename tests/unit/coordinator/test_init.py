from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.config import load_run_file
from coordinator.init import init_run
from protocol import keyfile
from protocol.errors import UserError
from trainer.config import load_trainer_run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "My Model"
    folder.mkdir()
    config = {"vocab_size": 260, "hidden_size": 16, "eos_token_id": [256, 257]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_new_run_works_as_it_is(tmp_path: Path, model: Path) -> None:
    path = init_run(tmp_path / "run", name='a "quoted" name', model=model, relays=("http://relay:8601",))
    run_file = load_run_file(path)
    assert (run_file.run.name, run_file.model.name, run_file.model.path) == ('a "quoted" name', "My Model", model)
    assert run_file.sampling.eos_token_ids == (256, 257)
    assert run_file.shardcast.relays == ("http://relay:8601",)
    assert run_file.run.trainer_key == keyfile.load(tmp_path / "run" / "trainer.key").key_id
    assert run_file.verification.thresholds_file == tmp_path / "run" / "calibration" / "thresholds.toml"
    assert load_trainer_run(path).model_path == model


def test_keys_of_a_new_run_are_two(tmp_path: Path, model: Path) -> None:
    init_run(tmp_path / "run", name="x", model=model, relays=())
    keys = {keyfile.load(tmp_path / "run" / f"{name}.key").key_id for name in ("coordinator", "trainer")}
    assert len(keys) == 2


def test_a_run_is_never_overwritten(tmp_path: Path, model: Path) -> None:
    path = init_run(tmp_path / "run", name="x", model=model, relays=())
    before = path.read_bytes()
    with pytest.raises(UserError, match="choose another folder"):
        init_run(tmp_path / "run", name="y", model=model, relays=())
    assert path.read_bytes() == before


def test_without_a_model_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.path"):
        init_run(tmp_path / "run", name="x", model=tmp_path, relays=())
    assert not (tmp_path / "run").exists()


def test_with_a_relay_that_is_none_nothing_is_made(tmp_path: Path, model: Path) -> None:
    with pytest.raises(UserError, match=r"--relay: 'relay:8601' is no relay's URL"):
        init_run(tmp_path / "run", name="x", model=model, relays=("http://relay:8601", "relay:8601"))
    assert not (tmp_path / "run").exists()
