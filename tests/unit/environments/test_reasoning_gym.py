"""The adapter to reasoning-gym: disjoint sets, exact scores, clear errors."""

from __future__ import annotations

import pytest

from environments.reasoning_gym import ReasoningGym
from protocol.errors import UserError

SUMS = ReasoningGym(
    dataset="chain_sum",
    options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    template="Question: What is {expression}?\nAnswer:",
)


def test_a_template_asks_in_its_own_words():
    task = SUMS.task(0)
    assert task.prompt.startswith("Question: What is ")
    assert eval(task.prompt.removeprefix("Question: What is ").removesuffix("?\nAnswer:")) == int(task.reference)


def test_held_out_questions_are_never_trained_on_even_in_a_small_space():
    trained = {SUMS.task(i).prompt for i in range(150)}
    held_out = {SUMS.eval_task(i).prompt for i in range(50)}
    assert trained
    assert held_out
    assert trained.isdisjoint(held_out)


def test_tasks_are_the_same_anywhere_and_scores_are_exact():
    again = ReasoningGym(dataset=SUMS.dataset, options=SUMS.options, template=SUMS.template)
    for task in (SUMS.task(5), SUMS.eval_task(5)):
        assert (again.task(5), again.eval_task(5))[task.index < 0] == task
        assert again.score(task, f" {task.reference}") == 1.0
        assert again.score(task, f"{task.reference}7") == 0.0
        assert again.score(task, "") == 0.0


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"dataset": "chain_sums"}, "chain_sum"),
        ({"options": {"terms": 2}}, "terms"),
        ({"options": {"min_terms": -1}}, "min_terms"),
        ({"template": "{wrong}"}, "expression"),
    ],
)
def test_errors_say_what_to_write_instead(params, said):
    with pytest.raises(UserError, match=said):
        ReasoningGym(**params).task(0)
