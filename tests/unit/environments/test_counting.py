"""Counting on: the first numbers decide, whatever the length limit cuts."""

from __future__ import annotations

import pytest

from environments.counting import Counting


def test_starts_are_held_out():
    environment = Counting()
    held_out = {environment.eval_task(i).prompt for i in range(environment.eval_size)}
    trained = {environment.task(i).prompt for i in range(environment.max_start - environment.held_out)}
    assert len(held_out) == 16
    assert len(trained) == 64
    assert held_out.isdisjoint(trained)


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (" 9, 10, 11, 12, 13", 1.0),
        (" 9, 10, 11", 1.0),
        (" 9,10,11,", 1.0),
        (" 9, 10, 11 and so on", 1.0),
        (" 9, 10, 112", 0.0),
        (" 9, 10", 0.0),
        (" 10, 11, 12", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_first_terms_count(completion, score):
    environment = Counting(terms=3)
    task = next(task for i in range(64) if (task := environment.task(i)).prompt == "Count from 7: 7, 8,")
    assert environment.score(task, completion) == score


def test_a_list_of_numbers_is_well_formed():
    assert Counting().well_formed(" 9, 10, 11,")
    assert not Counting().well_formed(" nine, ten")
