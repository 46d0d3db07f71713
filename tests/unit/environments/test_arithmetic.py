"""The sums: deterministic, held-out pairs never trained on, exact scores."""

from __future__ import annotations

import pytest

from environments.arithmetic import Arithmetic
from environments.base import Environment
from protocol.errors import UserError


def test_training_goes_through_all_pairs_that_are_not_held_out():
    environment = Arithmetic()
    held_out = {environment.eval_task(i).prompt for i in range(environment.eval_size)}
    epoch = [environment.task(i).prompt for i in range(environment.train_size)]
    assert isinstance(environment, Environment)
    assert len(held_out) == 200
    assert len(set(epoch)) == environment.train_size == 29 * 19 - 200
    assert held_out.isdisjoint(epoch)


def test_epochs_differ_in_order_and_tasks_are_the_same_anywhere():
    environment, again = Arithmetic(seed=3), Arithmetic(seed=3)
    size = environment.train_size
    first = [environment.task(i).prompt for i in range(size)]
    second = [environment.task(size + i).prompt for i in range(size)]
    assert sorted(first) == sorted(second)
    assert first != second
    assert [again.task(i) for i in range(5)] == [environment.task(i) for i in range(5)]
    assert Arithmetic(seed=4).eval_task(7) == environment.eval_task(7)


def test_the_prompt_has_no_example_and_the_reference_is_the_sum():
    task = Arithmetic(max_a=4, max_b=1, held_out=1).task(0)
    a, b = task.prompt.removeprefix("Question: What is ").removesuffix("?\nAnswer:").split(" + ")
    assert task.reference == str(int(a) + int(b))
    assert task.task_id == "arithmetic/0"


def test_held_out_tasks_have_negative_indices():
    assert Arithmetic().eval_task(0).index == -1
    with pytest.raises(IndexError):
        Arithmetic().eval_task(200)
    with pytest.raises(IndexError):
        Arithmetic().task(-1)


@pytest.mark.parametrize(
    ("completion", "score", "well_formed"),
    [(" {right}", 1.0, True), ("{right}\n", 1.0, True), (" {right}.", 0.0, False), ("+{right}", 0.0, False),
     (" 999", 0.0, True), ("", 0.0, False), (" {right} {right}", 0.0, False)],
)  # fmt: skip
def test_scores_are_exact(completion, score, well_formed):
    environment = Arithmetic()
    task = environment.task(0)
    text = completion.format(right=task.reference)
    assert environment.score(task, text) == score
    assert environment.well_formed(text) is well_formed


@pytest.mark.parametrize("params", [{"max_a": 0}, {"held_out": 0}, {"held_out": 29 * 19}])
def test_parameters_that_make_no_sense_are_refused(params):
    with pytest.raises(UserError, match="arithmetic"):
        Arithmetic(**params)


def test_the_prompt_can_be_another_and_must_hold_both_numbers() -> None:
    task = Arithmetic(template="{a} plus {b} is").task(0)
    a, b = (int(word) for word in task.prompt.split() if word.isdigit())
    assert task.prompt == f"{a} plus {b} is"
    assert task.reference == str(a + b)
    with pytest.raises(UserError, match="template"):
        Arithmetic(template="What is {a}?")
