from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import UserError
from trainer.config import load_trainer_run
from trainer.crew import objective_of

GOOD = """
[run]
name = "anything the coordinator reads"
[model]
path = "model"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_a_run_file_needs_no_trainer_section(tmp_path: Path) -> None:
    run = load_trainer_run(write(tmp_path, GOOD))
    assert run.model_path == tmp_path / "model"
    assert (run.trainer.loss, run.trainer.advantage, run.trainer.behaviour_tolerance) == ("ipo", "dr_grpo", 0.0)


def test_paths_are_relative_to_the_run_file(tmp_path: Path) -> None:
    run = load_trainer_run(
        write(tmp_path, GOOD + '[trainer]\nkey = "keys/trainer.key"\ncheckpoints = "/var/checkpoints"\n')
    )
    assert run.trainer.key == tmp_path / "keys" / "trainer.key"
    assert run.trainer.token == tmp_path / "trainer.token"
    assert run.trainer.checkpoints == Path("/var/checkpoints")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("learning_rate = 0", "trainer.learning_rate"),
        ("learning_rat = 1e-5", "trainer.learning_rat"),
        ("versions = 0", "trainer.versions"),
        ('dtype = "float16"', "trainer.dtype"),
        ('advantage = "magic"', "magic"),
        ("pass_rate = [0.5, 0.2]", "trainer.pass_rate"),
        ('old_logprobs = "worker"', "trainer.old_logprobs"),
        ('old_logprobs = "ewma"', "ewma_decay"),
        ('optimizer = "muon"\nlora_rank = 4', "adapters"),
        ('advantage = "critic"\nmodifiers = [{ name = "vcpo", baseline = true }]', "two baselines"),
        ("updates_per_batch = 0", "trainer.updates_per_batch"),
        ("versions = true", "versions must be a number"),
        ('versions = "2"', "versions must be a number"),
        ("ewma_decay = true", "ewma_decay must be a number"),
        ("learning_rate = inf", "trainer.learning_rate"),
        ("behaviour_tolerance = inf", "trainer.behaviour_tolerance"),
        ("lora_alpha = 8.0", "without lora_rank"),
        ("token_budget = 1", "trainer.token_budget"),
    ],
)
def test_a_mistake_names_file_and_field(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path, GOOD + f"[trainer]\n{line}\n")
    with pytest.raises(UserError) as caught:
        load_trainer_run(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('loss = "opd"', "trainer.teacher"),
        ('teacher = "teacher"', "nothing asks for trainer.teacher"),
        ('loss = "ppo_ewma"', "trainer.ewma_decay"),
    ],
)
def test_what_an_objective_needs_is_said_before_anything_is_waited_for(tmp_path: Path, line: str, message: str) -> None:
    run = load_trainer_run(write(tmp_path, GOOD + f"[trainer]\n{line}\n"))
    with pytest.raises(UserError, match=message):
        objective_of(run.trainer)


@pytest.mark.parametrize("line", ["[[trainer]]\n", "trainer = 3\n"])
def test_a_trainer_section_is_a_table(tmp_path: Path, line: str) -> None:
    with pytest.raises(UserError, match="must be a table"):
        load_trainer_run(write(tmp_path, line + GOOD if "=" in line else GOOD + line))


def test_a_critic_goes_with_vcpos_rate(tmp_path: Path) -> None:
    run = load_trainer_run(write(tmp_path, GOOD + '[trainer]\nadvantage = "critic"\nmodifiers = [{ name = "vcpo" }]\n'))
    assert run.trainer.modifiers == ({"name": "vcpo"},)


@pytest.mark.parametrize(
    ("text", "message"), [("[model", "not valid TOML"), ("[run]\n", "model.path"), ("model = 3", "model.path")]
)
def test_what_is_no_run_file_is_the_users_mistake(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_trainer_run(write(tmp_path, text))


def test_an_absent_file_says_who_writes_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="coordinator init"):
        load_trainer_run(tmp_path / "run.toml")
