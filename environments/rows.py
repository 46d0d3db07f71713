"""Rows of a JSONL or Parquet file as training and held-out tasks, for environments whose tasks come from a file.

Which rows are held out depends on each row's own prompt, so that adding rows moves none from one side to the other.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.base import check_index, digest_order, epoch_choice, eval_index, held_out
from protocol.errors import UserError
from protocol.rollout import Task

_MAX_ROWS = 2_000_000
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Split:
    """Rows to train on, and held-out ones, each in a fixed order."""

    training: tuple[Row, ...]
    held_out: tuple[Row, ...]

    def training_row(self, seed: int, index: int) -> Row:
        """Every epoch goes through all rows in an order of its own."""
        return self.training[epoch_choice(seed, check_index(index), len(self.training))]

    def held_out_row(self, index: int) -> Row:
        return self.held_out[check_index(index, len(self.held_out))]


class RowTasks(ABC):
    """The tasks of an environment whose rows are split: in an order by its seed, and those held out."""

    seed: int

    @property
    @abstractmethod
    def _split(self) -> Split:
        """Its rows."""

    @abstractmethod
    def _task(self, index: int, row: Row) -> Task:
        """The task that a row makes."""

    @property
    def eval_size(self) -> int:
        return len(self._split.held_out)

    def task(self, index: int) -> Task:
        return self._task(index, self._split.training_row(self.seed, index))

    def eval_task(self, index: int) -> Task:
        return self._task(eval_index(index), self._split.held_out_row(index))


def read_rows(path: str, columns: tuple[str, ...]) -> list[Row]:
    """All rows, each with these columns. Raises UserError that names the file, the line and what is wrong."""
    file = Path(path)
    if not file.is_absolute():
        raise UserError(f"path = {path!r}: give an absolute path, since tasks are scored in another folder")
    if not file.is_file():
        raise UserError(f"there is no file {path}: coordinator and verifier both read it")
    rows = _parquet(file) if file.suffix == ".parquet" else _json_lines(file)
    for number, row in enumerate(rows, 1):
        missing = [name for name in columns if row.get(name) is None]
        if missing:
            raise UserError(f"{path}: row {number} has no {missing[0]!r}; it has {', '.join(row) or 'nothing'}")
    return rows


def split_rows(rows: list[Row], key: str, one_in: int, what: str) -> Split:
    """Split by a digest of the `key` column; rows with the same are one. Raises UserError if a side is empty."""
    unique = {str(row[key]): row for row in rows}
    order = sorted(unique, key=digest_order)
    training = tuple(unique[text] for text in order if not held_out(text, one_in))
    kept = tuple(unique[text] for text in order if held_out(text, one_in))
    if not training or not kept:
        raise UserError(
            f"{what}: of {len(unique)} different rows {len(kept)} are held out by eval_one_in = {one_in}: both sides need some"
        )
    return Split(training, kept)


def _json_lines(file: Path) -> list[Row]:
    rows: list[Row] = []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise UserError(f"{file}: line {number} is no JSON object")
                rows.append(row)
                if len(rows) > _MAX_ROWS:
                    raise UserError(f"{file} has more than {_MAX_ROWS} rows: take a part of it")
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file}: line {len(rows) + 1} is not JSON: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    return rows


def _parquet(file: Path) -> list[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UserError(f"{file}: Parquet needs pyarrow: pip install 'rollswarm[coordinator]'") from error
    try:
        table = parquet.read_table(file)
    except (ArrowException, OSError) as error:
        raise UserError(f"cannot read {file}: {error}") from error
    if table.num_rows > _MAX_ROWS:
        raise UserError(f"{file} has more than {_MAX_ROWS} rows: take a part of it")
    return list(table.to_pylist())


def fill(template: str, row: Row, what: str) -> str:
    """The prompt of a row. Raises UserError if the template asks for a column that isn't there."""
    try:
        return template.format_map(row)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise UserError(f"{what}: the template uses {error}; a row offers {', '.join(map(str, row))}") from error
