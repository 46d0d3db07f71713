"""Environments by name: parameters are checked, choices are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from environments.arithmetic import Arithmetic
from environments.registry import BUILT_IN, make_environment
from protocol.errors import UserError


def test_an_environment_is_made_by_name_or_by_import_path():
    assert make_environment("arithmetic", {"max_a": 5, "held_out": 3}) == Arithmetic(max_a=5, held_out=3)
    assert make_environment("environments.arithmetic:Arithmetic") == Arithmetic()


# Those whose tasks are the user's own: from a file, or (tested where that library is installed) from another package.
OF_A_FILE = {"code", "dataset", "math"}
OF_A_LIBRARY = {"verifiers"}


def row(number: int) -> dict[str, object]:
    own = {"prompt": f"def f{number}():", "problem": f"{number} + 1"}
    return {**own, "reference": "1", "answer": "2", "tests": [{"input": "", "output": str(number)}]}


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """A file with the columns of all of them."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row(number)) + "\n" for number in range(40)))
    return str(path)


@pytest.mark.parametrize("name", sorted(BUILT_IN.keys() - OF_A_LIBRARY))
def test_every_built_in_environment_keeps_the_contract(name, rows):
    environment = make_environment(name, {"path": rows} if name in OF_A_FILE else {})
    task = environment.eval_task(0)
    assert task.environment == environment.name == name
    assert environment.eval_size > 0
    assert environment.score(task, "") == 0.0


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("arithmetics", {}, "choose arithmetic, calculator, code, counting"),
        ("arithmetic", {"maxa": 3}, "max_a"),
        ("arithmetic", {"max_a": "3"}, "must be of type int"),
        ("arithmetic", {"max_a": True}, "must be of type int"),
        ("no.such.module:Thing", {}, "cannot load"),
        ("environments.registry:make_environment", {}, "must be a dataclass"),
    ],
)
def test_errors_name_the_choices(name, params, said):
    with pytest.raises(UserError, match=said):
        make_environment(name, params)
