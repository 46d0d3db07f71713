"""Programs of strangers: the right ones pass, the rest can neither learn what is expected nor reach anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from environments.code import Code, last_block, read_tests
from environments.jail import Jail
from environments.sandbox import Scorer
from protocol.errors import UserError
from protocol.rollout import Task

ROW = {
    "prompt": "Double a number.",
    "function": "double",
    "tests": [{"args": [2], "result": 4}, {"args": [-1], "result": -2}],
}
PRINTS = {"prompt": "Print twice the number read.", "tests": [{"input": "2\n", "output": "4"}]}


def task(row: dict) -> Task:
    return Task("code", 0, "", json.dumps({"function": row.get("function", ""), "tests": row["tests"]}))


def program(text: str) -> str:
    return f"Here it is:\n```python\n{text}\n```\n"


@pytest.mark.parametrize(
    ("row", "text", "score"),
    [
        (ROW, "def double(n):\n    return 2 * n", 1.0),
        (ROW, "print('noise')\ndef double(n):\n    return n * n", 0.0),
        (ROW, "import os\nprint(4)\nos._exit(0)", 0.0),
        (ROW, "def double(n):\n    import sys\n    print(4)\n    sys.exit(0)", 0.0),
        (ROW, "class All:\n    def __eq__(self, other): return True\ndef double(n): return All()", 0.0),
        (PRINTS, "print(2 * int(input()))", 1.0),
        (PRINTS, "print(2 * int(input()), end='  \\n\\n')", 1.0),
        (PRINTS, "print(5)", 0.0),
        (PRINTS, "syntax error", 0.0),
    ],
)
def test_a_program_passes_if_its_outputs_are_right(row: dict, text: str, score: float) -> None:
    assert Code().score(task(row), program(text)) == score


@pytest.mark.parametrize(
    "text",
    [
        "while True: pass",
        "x = bytearray(4 << 30)",
        "print('x' * (64 << 20))",
        "open('/tmp/mine', 'wb', 0).write(b'x'); print(4)",
        "import socket; socket.create_connection(('127.0.0.1', 9), 2); print(4)",
        "import socket; s = socket.socket(); s.connect(('10.0.0.1', 80)); print(4)",
    ],
)
def test_what_a_program_may_not_do_fails_it(text: str) -> None:
    assert Code(seconds=1).score(task(PRINTS), program(text)) == 0.0
    mine = Path("/tmp/mine")
    assert not mine.exists() or mine.stat().st_size == 0
    mine.unlink(missing_ok=True)


def test_a_program_sees_no_secret_and_nothing_that_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    said = Jail(2, 256 << 20).run("import os, sys; print(dict(os.environ), sys.argv, sys.path)", "")
    assert said is not None and "hunter2" not in said and "site-packages" not in said


def test_a_program_that_never_reads_its_input_does_not_hang_us() -> None:
    assert Jail(2, 256 << 20).run("print('done')", "x" * (4 << 20)) in ("done\n", None)
    assert Jail(2, 256 << 20).run("import sys; print(len(sys.stdin.read()))", "x" * (1 << 20)) == f"{1 << 20}\n"
    assert Jail(2, 256 << 20).run("a\0b", "") is None


async def test_it_works_below_the_scoring_process(tmp_path: Path) -> None:
    rows = [{**ROW, "prompt": f"Double a number, variant {number}."} for number in range(30)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    params = {"path": str(path)}
    scorer = Scorer(preload=[("code", params)])
    try:
        first = Code(**params).task(0)
        assert await scorer.score("code", params, first, program("def double(n): return n + n")) == 1.0
        assert await scorer.score("code", params, first, program("def double(n): return 4")) == 0.0
        assert await scorer.score("code", params, first, "no program") == 0.0
    finally:
        await scorer.close()


@pytest.mark.parametrize(
    "row",
    [
        {"tests": "["},
        {"tests": []},
        {"tests": [{"input": "x"}]},
        {"tests": [{"args": [], "result": 1}], "function": "a b"},
        {"tests": 7},
    ],
)
def test_tests_that_are_none_are_refused(row: dict) -> None:
    with pytest.raises(UserError):
        read_tests(row)


def test_the_last_block_is_the_program() -> None:
    assert last_block("```\nfirst\n```\nor\n```python\nsecond\n```") == "second\n"
    assert last_block("```python\n\n```") is None
