"""Answers as mathematics: what is equal counts, and only what the last box holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from environments.math import Math, final_answer
from protocol.errors import EnvironmentFault
from protocol.rollout import Task


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"so \boxed{3} no, \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{{a}}", "{a}"),
        (r"\boxed{1", None),
        (r"\boxed{}", None),
        ("the answer is 3", None),
    ],
)
def test_the_answer_is_what_the_last_box_holds(completion: str, answer: str | None) -> None:
    assert final_answer(completion) == answer
    assert Math().well_formed(completion) == (answer is not None)


@pytest.mark.parametrize(
    ("reference", "completion", "score"),
    [
        (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
        ("$0.5$", r"thus \boxed{\frac{2}{4}}", 1.0),
        (r"\boxed{7}", r"\boxed{7}", 1.0),
        (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1.0),
        ("7", r"\boxed{8}", 0.0),
        ("7", "7", 0.0),
        ("7", r"\boxed{7} or \boxed{8}", 0.0),
        ("7", "\\boxed{" + "9^" * 600 + "9}", 0.0),
    ],
)
def test_what_is_equal_counts(reference: str, completion: str, score: float) -> None:
    assert Math().score(Task("math", 0, "", reference), completion) == score


def test_a_reference_that_is_none_is_our_fault() -> None:
    with pytest.raises(EnvironmentFault, match="can't be read"):
        Math().score(Task("math", 0, "", ""), r"\boxed{7}")


def test_tasks_come_from_a_file(tmp_path: Path) -> None:
    rows = [{"problem": f"What is {n}+1?", "answer": n + 1} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    environment = Math(path=str(tmp_path / "rows.jsonl"))
    task = environment.task(3)
    assert "\\boxed{}" in task.prompt
    assert environment.score(task, f"\\boxed{{{task.reference}}}") == 1.0
    assert environment.eval_size > 0 and environment.eval_task(0).index == -1
