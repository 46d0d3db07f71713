from __future__ import annotations

import json
from pathlib import Path

import pytest

from environments.rows import fill, read_rows, split_rows
from protocol.errors import UserError


def write(path: Path, *rows: object) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def test_rows_are_read_and_held_to_their_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt": "a", "reference": 1}, "", {"prompt": "b", "reference": 0})
    assert [row["prompt"] for row in read_rows(path, ("prompt", "reference"))] == ["a", "b"]
    with pytest.raises(UserError, match="row 1 has no 'answer'; it has prompt, reference"):
        read_rows(path, ("answer",))


@pytest.mark.parametrize(
    ("rows", "message"), [(["{"], "line 1 is not JSON"), (['{"a": 1}', "[1]"], "line 2 is no JSON object")]
)
def test_a_line_that_can_not_be_read_is_named(tmp_path: Path, rows: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_rows(write(tmp_path / "rows.jsonl", *rows), ())


def test_a_path_must_be_absolute_and_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absolute"):
        read_rows("rows.jsonl", ())
    with pytest.raises(UserError, match="no file"):
        read_rows(str(tmp_path / "none.jsonl"), ())


def test_parquet_rows_are_rows(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "reference": ["1", "2"]}), path)
    assert [dict(row) for row in read_rows(str(path), ("prompt",))] == [
        {"prompt": "a", "reference": "1"},
        {"prompt": "b", "reference": "2"},
    ]
    path.write_bytes(b"not parquet")
    with pytest.raises(UserError, match="cannot read"):
        read_rows(str(path), ())


def test_sides_never_meet_and_new_rows_move_none() -> None:
    rows = [{"prompt": f"question {number}"} for number in range(200)]
    few, all_rows = split_rows(rows[:100], "prompt", 5, "t"), split_rows(rows, "prompt", 5, "t")
    held = {row["prompt"] for row in all_rows.held_out}
    assert held.isdisjoint(row["prompt"] for row in all_rows.training)
    assert {row["prompt"] for row in few.held_out} == held & {row["prompt"] for row in rows[:100]}
    assert sorted(all_rows.training_row(0, index)["prompt"] for index in range(len(all_rows.training))) == sorted(
        row["prompt"] for row in all_rows.training
    )
    with pytest.raises(UserError, match="both sides"):
        split_rows(rows[:1], "prompt", 5, "t")


def test_a_template_that_asks_for_too_much_is_told_what_there_is() -> None:
    assert fill("Q: {prompt}", {"prompt": "x"}, "t") == "Q: x"
    with pytest.raises(UserError, match="a row offers prompt"):
        fill("{question}", {"prompt": "x"}, "t")
