"""Mathematical problems from a file; answers are compared by math-verify, symbolically."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from environments.rows import Row, RowTasks, Split, fill, read_rows, split_rows
from protocol.errors import EnvironmentFault, UserError
from protocol.rollout import Task

_BOX = "\\boxed{"
_LONGEST_ANSWER = 1000  # characters: symbolic maths on a longer one is an attack, not an answer
_SECONDS = 5


@dataclass(frozen=True)
class Math(RowTasks):
    """Rows of `path` (JSONL or Parquet) with the columns `problem` and `answer`.

    The answer of a completion is what its last \\boxed{…} holds; a completion without one is wrong. Only that is compared, so
    that to write many candidates gains nothing.
    """

    name: ClassVar[str] = "math"

    path: str = ""
    template: str = "{problem}\nReason step by step, and put the final answer within \\boxed{{}}.\n"
    problem: str = "problem"
    answer: str = "answer"
    seed: int = 0
    eval_one_in: int = 10

    def __post_init__(self) -> None:
        if self.eval_one_in < 2:
            raise UserError("math: eval_one_in must be at least 2")

    @cached_property
    def _split(self) -> Split:
        try:
            import math_verify  # noqa: F401  (loaded before the scoring process gives its privileges up)
        except ImportError as error:
            raise UserError(f"math-verify is not installed ({error}): pip install 'rollswarm[coordinator]'") from error
        rows = read_rows(self.path, (self.problem, self.answer))
        return split_rows(rows, self.problem, self.eval_one_in, "math")

    def score(self, task: Task, completion: str) -> float:
        said = final_answer(completion)
        if said is None or len(said) > _LONGEST_ANSWER:
            return 0.0
        return float(same_answer(str(task.reference), said))

    def well_formed(self, completion: str) -> bool:
        return final_answer(completion) is not None

    def _task(self, index: int, row: Row) -> Task:
        return Task(self.name, index, fill(self.template, row, "math"), str(row[self.answer]))


def final_answer(completion: str) -> str | None:
    """What the last \\boxed{…} holds, braces balanced; None if there is none, or it is not closed."""
    start = completion.rfind(_BOX)
    if start < 0:
        return None
    depth, begin = 1, start + len(_BOX)
    for place in range(begin, len(completion)):
        depth += {"{": 1, "}": -1}.get(completion[place], 0)
        if depth == 0:
            return completion[begin:place].strip() or None
    return None


def same_answer(reference: str, said: str) -> bool:
    """Whether two answers are equal as mathematics. Raises EnvironmentFault if the reference can't be read."""
    from math_verify import parse, verify

    gold = parse(_boxed(reference), parsing_timeout=_SECONDS)
    if not gold:
        raise EnvironmentFault(f"the reference answer {reference!r:.100} can't be read by math-verify")
    given = parse(_boxed(said), parsing_timeout=_SECONDS)
    return bool(given) and bool(verify(gold, given, timeout_seconds=_SECONDS))


def _boxed(answer: str) -> str:
    bare = answer.strip().removeprefix("$").removesuffix("$")
    return f"${_BOX}{final_answer(bare) or bare}}}$"
