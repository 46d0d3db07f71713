"""Which of a run's environments take turns, and what can't be begun with this model."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from coordinator.config import RunFile
from coordinator.multi_turn import run_turns
from protocol.errors import UserError
from protocol.tokenizer import RunTokenizer
from tests.factories import TRAINER
from tests.tiny_model import EOS_TOKEN_ID, build_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def run_file(model: Path, *environments: dict[str, Any]) -> RunFile:
    return RunFile(
        run={"name": "test", "trainer_key": TRAINER.key_id},
        model={"name": "tiny", "path": model},
        sampling={"eos_token_ids": [EOS_TOKEN_ID]},
        environments=environments,
    )


def calculator(name: str = "calculator", max_tokens: int = 64, **params: Any) -> dict[str, Any]:
    return {"name": name, "kind": "calculator", "max_tokens": max_tokens, "params": {"stop": "=", **params}}


def test_only_environments_with_a_tool_take_turns(model: Path) -> None:
    environments = ({"name": "arithmetic", "max_tokens": 8}, calculator(), calculator("short", max_calls=1))
    found = run_turns(run_file(model, *environments), RunTokenizer(model))
    assert list(found) == ["calculator", "short"]
    turns = found["calculator"]
    tokenizer = RunTokenizer(model)
    assert turns.rules.stop_token_ids == tuple(tokenizer.encode("="))
    assert tokenizer.decode(turns.answer(tokenizer.encode("6 * 7="))) == "42"
    assert turns.rules.digest != found["short"].rules.digest


def test_the_process_that_examines_gets_them_whole(model: Path) -> None:
    turns = run_turns(run_file(model, calculator()), RunTokenizer(model))["calculator"]
    again = pickle.loads(pickle.dumps(turns))
    assert again.rules == turns.rules
    assert again.probe() == turns.probe()


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (calculator(stop="=>"), "0 of the model's tokens end in '=>'"),
        (calculator(stop=""), "0 of the model's tokens end in ''"),
        (calculator(stop="<|eos|>"), "0 of the model's tokens"),
        (calculator(max_tokens=17), "max_tokens = 17 has no room for a call and its answer of 16"),
        (calculator(max_calls=0), "calls must be 1 to 256"),
        (calculator(max_answer_tokens=5000), "tokens of an answer 1 to 4096"),
    ],
)
def test_what_can_t_be_begun_says_what_to_change(model: Path, environment: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match="calculator: .*" + said.replace("(", r"\(")):
        run_turns(run_file(model, environment), RunTokenizer(model))
