"""The environment with a calculator: its tasks, and what counts as an answer."""

from __future__ import annotations

import pytest

from environments.base import MultiTurn
from environments.calculator import Calculator
from environments.registry import make_environment
from protocol.errors import UserError


def test_no_expression_that_is_held_out_is_trained_on() -> None:
    environment = Calculator(terms=2, largest=9)
    held_out = {environment.eval_task(i).prompt for i in range(environment.eval_size)}
    trained = {environment.task(i).prompt for i in range(400)}
    assert len(trained) > 100 and held_out.isdisjoint(trained)
    assert {Calculator(seed=1, terms=2, largest=9).eval_task(i).prompt for i in range(100)} == held_out


def test_a_task_shows_how_the_tool_is_called_and_its_value_is_known() -> None:
    task = Calculator(largest=20).task(3)
    assert task.prompt.endswith("Work:") and "<<12 * 7 + 5>>89" in task.prompt
    expression = task.prompt.rpartition("What is ")[2].partition("?")[0]
    assert task.reference == str(eval(expression))  # our own text, of digits and three operators
    assert Calculator(terms=5, largest=999).task(0).reference != "error"


def test_it_says_how_its_completions_call() -> None:
    environment = make_environment("calculator", {"max_calls": 3})
    assert isinstance(environment, MultiTurn)
    use = environment.tool_use
    assert (use.tool, use.stop, use.max_calls, use.max_answer_tokens) == ("calculator", ">>", 3, 16)
    assert not isinstance(make_environment("arithmetic"), MultiTurn)


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (" <<6 * 7>>\nAnswer: 42", 1.0),
        ("\nAnswer: 42\n\nQuestion: What is 1 + 1?\nAnswer: 2", 1.0),
        ("\nAnswer: 42.", 1.0),
        ("\nAnswer: 421", 0.0),
        ("\nAnswer: 41\nAnswer: 42", 0.0),
        (" <<6 * 7>>42", 0.0),
        ("", 0.0),
    ],
)
def test_the_first_answer_counts(completion: str, score: float) -> None:
    task = Calculator()._task(0, "6 * 7")
    assert Calculator().score(task, completion) == score
    assert Calculator().well_formed(completion) is ("Answer:" in completion)


@pytest.mark.parametrize("params", [{"terms": 1}, {"terms": 6}, {"largest": 8}, {"eval_size": 0}, {"template": "x"}])
def test_parameters_that_make_no_tasks_are_refused(params: dict[str, object]) -> None:
    with pytest.raises(UserError, match="calculator: "):
        make_environment("calculator", params)
