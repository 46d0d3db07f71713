"""Arithmetic with a calculator: what is too hard for a small model alone is easy if it asks the tool and uses the answer."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import dataclass
from typing import ClassVar

from environments.base import ToolUse, check_index, eval_index, held_out
from environments.tools.calculator import answer
from protocol.errors import UserError
from protocol.rollout import Task

_ANSWER = re.compile(r"Answer: *(-?\d{1,20})(?!\d)")
_HELD_OUT_ONE_IN = 16
_TEMPLATE = """\
Question: What is 12 * 7 + 5?
Work: <<12 * 7 + 5>>89
Answer: 89

Question: What is 64 - 3 * 18?
Work: <<64 - 3 * 18>>10
Answer: 10

Question: What is {expression}?
Work:"""


@dataclass(frozen=True)
class Calculator:
    """Expressions of `terms` numbers up to `largest`, with +, - and *. Right if the first `Answer:` is the value.

    `template` is the prompt, with {expression} where it goes, and shows how the calculator is called: what stands before
    `stop` is worked out, and the value written behind it. `max_calls` of a completion are.
    """

    name: ClassVar[str] = "calculator"

    seed: int = 0
    terms: int = 3
    largest: int = 99
    eval_size: int = 100
    stop: str = ">>"
    max_calls: int = 2
    max_answer_tokens: int = 16
    template: str = _TEMPLATE

    def __post_init__(self) -> None:
        if not 2 <= self.terms <= 5 or not 9 <= self.largest <= 999:
            raise UserError(
                f"calculator: terms must be 2 to 5 and largest 9 to 999, got {self.terms} and {self.largest}"
            )
        if self.eval_size < 1:
            raise UserError(f"calculator: eval_size must be at least 1, got {self.eval_size}")
        if "{expression}" not in self.template:
            raise UserError(f"calculator: template must hold {{expression}}, got {self.template!r}")

    @property
    def tool_use(self) -> ToolUse:
        return ToolUse("calculator", self.stop, self.max_calls, self.max_answer_tokens)

    def task(self, index: int) -> Task:
        return self._task(index, self._expression(f"{self.seed}/{check_index(index)}", held=False))

    def eval_task(self, index: int) -> Task:
        return self._task(
            eval_index(check_index(index, self.eval_size)), self._expression(f"held out/{index}", held=True)
        )

    def score(self, task: Task, completion: str) -> float:
        found = _ANSWER.search(completion)
        return float(found is not None and found[1] == task.reference)

    def well_formed(self, completion: str) -> bool:
        return _ANSWER.search(completion) is not None

    def _expression(self, key: str, *, held: bool) -> str:
        """Of those that are held out, or of the others: which are depends on the expression alone."""
        for attempt in itertools.count():
            draw = random.Random(f"rollswarm/calculator/{key}/{attempt}")
            words = [str(draw.randint(2, self.largest))]
            for _ in range(self.terms - 1):
                words += [draw.choice("+-*"), str(draw.randint(2, self.largest))]
            expression = " ".join(words)
            if held_out(expression, _HELD_OUT_ONE_IN) is held:
                return expression
        raise AssertionError("one in sixteen is held out")

    def _task(self, index: int, expression: str) -> Task:
        return Task(self.name, index, self.template.replace("{expression}", expression), answer(expression))
