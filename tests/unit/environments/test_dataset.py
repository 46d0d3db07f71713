from __future__ import annotations

import json
from pathlib import Path

import pytest

from environments.base import Environment
from environments.dataset import Dataset
from environments.registry import make_environment
from protocol.errors import UserError
from protocol.rollout import Task


@pytest.fixture
def path(tmp_path: Path) -> str:
    rows = [{"prompt": f"Twice {number} is", "reference": str(2 * number)} for number in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path / "rows.jsonl")


def test_tasks_are_the_same_anywhere_and_held_out_ones_apart(path: str) -> None:
    one, other = Dataset(path=path), make_environment("dataset", {"path": path})
    assert isinstance(other, Environment)
    assert [one.task(i) for i in range(70)] == [other.task(i) for i in range(70)]
    held = {one.eval_task(i).prompt for i in range(one.eval_size)}
    assert held and held.isdisjoint(one.task(i).prompt for i in range(70))
    assert one.eval_task(0).index == -1


@pytest.mark.parametrize(
    ("match", "completion", "score"),
    [
        ("exact", " 1,234 ", 1.0),
        ("exact", "1234", 0.0),
        ("contains", "It is 1,234, I think", 1.0),
        ("contains", "It is 11,234", 0.0),
        ("last_number", "first 7, then 1234.0", 1.0),
        ("last_number", "1234 or rather 7", 0.0),
        ("last_number", "nothing", 0.0),
    ],
)
def test_a_completion_is_held_against_the_reference(match: str, completion: str, score: float) -> None:
    assert Dataset(match=match).score(Task("dataset", 0, "", "1,234"), completion) == score


def test_settings_that_make_no_sense_are_refused() -> None:
    for wrong in ({"match": "fuzzy"}, {"eval_one_in": 1}):
        with pytest.raises(UserError):
            Dataset(**wrong)  # type: ignore[arg-type]
