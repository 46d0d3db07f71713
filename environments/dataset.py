"""Prompts and references from a file, compared as text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from environments.rows import Row, RowTasks, Split, fill, read_rows, split_rows
from protocol.errors import UserError
from protocol.rollout import Task

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_MATCHES = ("exact", "contains", "last_number")


@dataclass(frozen=True)
class Dataset(RowTasks):
    """Rows of `path` (JSONL or Parquet) with the columns `prompt` and `reference`.

    `match`: `exact` (but for space around), `contains` (as words of its own; a model may then list everything: prefer
    the others), or `last_number` (the last number of the completion equals the reference).
    """

    name: ClassVar[str] = "dataset"

    path: str = ""
    template: str = "{prompt}"
    reference: str = "reference"
    key: str = "prompt"
    match: str = "exact"
    seed: int = 0
    eval_one_in: int = 10

    def __post_init__(self) -> None:
        if self.match not in _MATCHES:
            raise UserError(f"dataset: match must be one of {', '.join(_MATCHES)}, got {self.match!r}")
        if self.eval_one_in < 2:
            raise UserError("dataset: eval_one_in must be at least 2")

    @cached_property
    def _split(self) -> Split:
        rows = read_rows(self.path, (self.key, self.reference))
        return split_rows(rows, self.key, self.eval_one_in, "dataset")

    def score(self, task: Task, completion: str) -> float:
        reference, said = str(task.reference).strip(), completion.strip()
        if self.match == "exact":
            return float(said == reference)
        if self.match == "contains":
            return float(re.search(rf"(?<!\w){re.escape(reference)}(?!\w)", said) is not None)
        numbers = _NUMBER.findall(said)
        return float(bool(numbers) and _same_number(numbers[-1], reference))

    def well_formed(self, completion: str) -> bool:
        return bool(_NUMBER.search(completion)) if self.match == "last_number" else bool(completion.strip())

    def _task(self, index: int, row: Row) -> Task:
        return Task(self.name, index, fill(self.template, row, "dataset"), str(row[self.reference]))


def _same_number(said: str, reference: str) -> bool:
    try:
        return float(said.replace(",", "")) == float(reference.replace(",", ""))
    except ValueError:
        return False
