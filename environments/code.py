"""Programming problems from a file: the completion's program runs in a sandbox and must give the right outputs.

What is expected never enters the sandbox: outputs are compared outside, so that a program can't learn or forge a verdict.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from environments.jail import Jail, isolated
from environments.rows import Row, RowTasks, Split, fill, read_rows, split_rows
from protocol.errors import UserError
from protocol.rollout import Task

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_MAX_CASES = 64
# Reads the arguments, calls the function, and prints the result as JSON after a line of its own.
_CALL = (
    "\n\nimport json as _j, sys as _s\n_a = _j.loads(_s.stdin.read())\n_r = {name}(*_a)\nprint()\nprint(_j.dumps(_r))\n"
)


@dataclass(frozen=True)
class Code(RowTasks):
    """Rows of `path` (JSONL or Parquet) with the columns `prompt` and `tests`.

    `tests`: a list (or its JSON) of `{"input": text, "output": text}` for programs that read and print, or of
    `{"args": […], "result": …}` for a function whose name is in the column `function`. The program is the last fenced block
    of a completion. All tests must pass. Limits: `seconds` and `memory_mib` per test.

    `network = "allowed"` runs it without a network namespace of its own, for hosts that grant none: only where the machine
    has nothing to reach.
    """

    name: ClassVar[str] = "code"

    path: str = ""
    template: str = "{prompt}\nAnswer with one Python program in a fenced block.\n"
    seed: int = 0
    eval_one_in: int = 10
    seconds: int = 4
    memory_mib: int = 512
    network: str = "none"

    def __post_init__(self) -> None:
        if self.network not in ("none", "allowed"):
            raise UserError(f'code: network must be "none" or "allowed", got {self.network!r}')
        if self.eval_one_in < 2 or self.seconds < 1 or self.memory_mib < 64:
            raise UserError("code: eval_one_in must be at least 2, seconds at least 1, memory_mib at least 64")

    @cached_property
    def _split(self) -> Split:
        rows = read_rows(self.path, ("prompt", "tests"))
        for row in rows:
            read_tests(row)
        return split_rows(rows, "prompt", self.eval_one_in, "code")

    def score(self, task: Task, completion: str) -> float:
        program = last_block(completion)
        if program is None:
            return 0.0
        reference = json.loads(task.reference)
        jail = Jail(self.seconds, self.memory_mib << 20, network=self.network == "allowed" or isolated())
        return float(all(_passes(jail, program, test, reference["function"]) for test in reference["tests"]))

    def well_formed(self, completion: str) -> bool:
        return last_block(completion) is not None

    def _task(self, index: int, row: Row) -> Task:
        reference = json.dumps({"function": row.get("function") or "", "tests": read_tests(row)}, sort_keys=True)
        return Task(self.name, index, fill(self.template, row, "code"), reference)


def read_tests(row: Row) -> list[dict[str, Any]]:
    """A row's tests. Raises UserError that says what is wrong with them."""
    tests = row["tests"]
    try:
        tests = json.loads(tests) if isinstance(tests, str) else list(tests)
    except (ValueError, TypeError) as error:
        raise UserError(f"code: tests must be a list, got {row['tests']!r:.80}") from error
    function = str(row.get("function") or "")
    fields = {"args", "result"} if function else {"input", "output"}
    if not 1 <= len(tests) <= _MAX_CASES or not all(
        isinstance(test, Mapping) and fields <= test.keys() for test in tests
    ):
        raise UserError(
            f"code: each of 1 to {_MAX_CASES} tests needs {' and '.join(sorted(fields))}, got {tests!r:.120}"
        )
    if function and not function.isidentifier():
        raise UserError(f"code: {function!r} is no name of a function")
    return [dict(test) for test in tests]


def last_block(completion: str) -> str | None:
    """The program of a completion."""
    found = _BLOCK.findall(completion)
    return found[-1] if found and found[-1].strip() else None


def _passes(jail: Jail, program: str, test: Mapping[str, Any], function: str) -> bool:
    if not function:
        printed = jail.run(program, str(test["input"]))
        return printed is not None and _lines(printed) == _lines(str(test["output"]))
    printed = jail.run(program + _CALL.format(name=function), json.dumps(test["args"]))
    if printed is None:
        return False
    try:
        return bool(json.loads(printed.rstrip("\n").rpartition("\n")[2]) == test["result"])
    except (ValueError, RecursionError):
        return False


def _lines(text: str) -> list[str]:
    """Lines without space at their ends, and without empty ones at the end, as contests compare."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
