"""Environments by name: parameters are checked, choices are named."""

from __future__ import annotations

import pytest

from environments.arithmetic import Arithmetic
from environments.registry import BUILT_IN, make_environment
from protocol.errors import UserError


def test_an_environment_is_made_by_name_or_by_import_path():
    assert make_environment("arithmetic", {"max_a": 5, "held_out": 3}) == Arithmetic(max_a=5, held_out=3)
    assert make_environment("environments.arithmetic:Arithmetic") == Arithmetic()


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_built_in_environment_keeps_the_contract(name):
    environment = make_environment(name)
    task = environment.eval_task(0)
    assert task.environment == environment.name == name
    assert environment.eval_size > 0
    assert environment.max_tokens > 0
    assert environment.score(task, "") == 0.0


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("arithmetics", {}, "choose arithmetic, counting"),
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
