"""Procedural tasks of the `reasoning-gym` library by the name of their data set. Exact: its partial credit counts as 0."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from environments.base import check_index, eval_index, held_out
from protocol.errors import EnvironmentFault, UserError
from protocol.rollout import Task

# Tried before giving up on a task of the wanted side: a failure then has a chance of 0.9^400 ≈ 10^-18.
_ATTEMPTS = 400


@dataclass(frozen=True)
class ReasoningGym:
    """Data set `dataset` of reasoning-gym with its own `options` (`min_terms = 2` and so on).

    `template` makes the prompt; it may use `{question}` and whatever the data set puts into an item's metadata, such as
    chain_sum's `{expression}`. One question in `eval_one_in`, chosen by a digest of its text, is held out, so that the
    two sets cannot meet however small the space of questions is. `pool` bounds the indices asked of the library.
    """

    name: ClassVar[str] = "reasoning_gym"

    dataset: str = "chain_sum"
    options: dict[str, Any] = field(default_factory=dict)
    template: str = "{question}"
    seed: int = 0
    pool: int = 2_000_000_000
    eval_size: int = 200
    eval_one_in: int = 10

    def __post_init__(self) -> None:
        if self.eval_one_in < 2 or self.pool < 1 or self.eval_size < 0:
            raise UserError("reasoning_gym: eval_one_in must be at least 2, pool at least 1, eval_size at least 0")

    @cached_property
    def _items(self) -> Any:
        try:
            with warnings.catch_warnings():
                # What the compiler has to say of cellpylib, which it imports, helps nobody here.
                warnings.simplefilter("ignore", SyntaxWarning)
                import reasoning_gym
                from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise UserError(f"reasoning_gym is not installed ({error}): pip install reasoning-gym") from error
        if self.dataset not in DATASETS:
            close = [name for name in sorted(DATASETS) if name.split("_")[0] in self.dataset]
            raise UserError(f"reasoning_gym has no data set {self.dataset!r}; some it has: {', '.join(close[:8])}")
        try:
            return reasoning_gym.create_dataset(self.dataset, seed=self.seed, size=self.pool, **self.options)
        except (TypeError, AssertionError, ValueError) as error:
            raise UserError(f"reasoning_gym {self.dataset}: options {self.options}: {error}") from error

    def task(self, index: int) -> Task:
        return self._task(check_index(index))

    def eval_task(self, index: int) -> Task:
        return self._task(eval_index(check_index(index, self.eval_size)))

    def score(self, task: Task, completion: str) -> float:
        item = self._item(task.index)
        credit = float(self._items.score_answer(completion.strip(), item))
        return float(credit >= 1.0)

    def well_formed(self, completion: str) -> bool:
        return bool(completion.strip())

    def _task(self, index: int) -> Task:
        item = self._item(index)
        fields = {**item["metadata"], "question": item["question"]}
        try:
            prompt = self.template.format_map(fields)
        except (KeyError, IndexError, ValueError) as error:
            known = ", ".join(sorted(fields))
            raise UserError(f"reasoning_gym: the template uses {error}; {self.dataset} offers {known}") from error
        return Task(self.name, index, prompt, str(item["answer"]))

    def _item(self, index: int) -> Any:
        """The item behind a `Task.index`: the first from a position of its own on that lies on the right side."""
        wants_held_out = index < 0
        position = eval_index(index) if wants_held_out else index
        # Held-out tasks start half-way through the pool, so that both sets are spread over it.
        first = position * _ATTEMPTS + (self.pool // 2 if wants_held_out else 0)
        for attempt in range(_ATTEMPTS):
            item = self._items[(first + attempt) % self.pool]
            if held_out(self._identity(item), self.eval_one_in) == wants_held_out:
                return item
        raise EnvironmentFault(f"reasoning_gym {self.dataset}: no task found for index {index}; raise its variety")

    def _identity(self, item: Any) -> str:
        return json.dumps([self.dataset, item["question"]])
