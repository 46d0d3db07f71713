"""What an environment is: tasks in a deterministic order, and a score for a completion."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from protocol.rollout import Task


@runtime_checkable
class Environment(Protocol):
    """A source of tasks and their exact scores. A frozen dataclass: its fields are the parameters of a run file.

    `task(i)` for i ≥ 0 depends on the parameters and i alone, so that any process can make it again. Held-out tasks
    never appear among them; `eval_task(i)`, 0 ≤ i < `eval_size`, gives those, and their `Task.index` is −1 − i, so no
    held-out task shares an id with one that is trained on.
    """

    name: ClassVar[str]

    @property
    def eval_size(self) -> int:
        """How many held-out tasks there are."""
        ...

    def task(self, index: int) -> Task:
        """The training task at `index` ≥ 0."""
        ...

    def eval_task(self, index: int) -> Task:
        """The held-out task at 0 ≤ `index` < `eval_size`."""
        ...

    def score(self, task: Task, completion: str) -> float:
        """1.0 if the completion (special tokens removed) solves the task, else 0.0."""
        ...

    def well_formed(self, completion: str) -> bool:
        """Whether the completion reads as an answer at all, right or wrong."""
        ...


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How completions of an environment call a tool.

    `tool`: a name of environments.tools. `stop`: the text on which a call ends; every token whose own text ends so ends one,
    and the tool sees the turn's text before it. At most `max_calls` are answered, each by at most `max_answer_tokens` tokens.
    """

    tool: str
    stop: str
    max_calls: int
    max_answer_tokens: int


@runtime_checkable
class MultiTurn(Protocol):
    """What an environment has beside the methods of Environment if its tasks take several turns.

    `score` and `well_formed` are then given what the model wrote, its turns one after the other, and not the tool's answers.
    """

    @property
    def tool_use(self) -> ToolUse: ...


def eval_index(index: int) -> int:
    """The `Task.index` of the held-out task at `index`; its own inverse."""
    return -1 - index


def digest_order(key: str) -> bytes:
    """A sort key that shuffles things the same way on every machine and in every version."""
    return hashlib.sha256(key.encode()).digest()


def held_out(key: str, one_in: int) -> bool:
    """Whether the task that `key` describes belongs to the held-out set, of which one in `one_in` tasks is."""
    return int.from_bytes(digest_order(key)[:8], "big") % one_in == 0


def epoch_choice(seed: int, index: int, count: int) -> int:
    """Which of `count` tasks comes at `index`: every epoch goes through all of them in an order of its own."""
    epoch, offset = divmod(index, count)
    order = list(range(count))
    random.Random(f"rollswarm/{seed}/{epoch}").shuffle(order)
    return order[offset]


def check_index(index: int, limit: int | None = None) -> int:
    """Return `index` if it is in [0, limit), else raise IndexError."""
    if index < 0 or (limit is not None and index >= limit):
        raise IndexError(f"there is no task {index}" + ("" if limit is None else f", only 0 to {limit - 1}"))
    return index
