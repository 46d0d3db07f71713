"""Publications that were measured, one JSON object a line: a run can be made in pieces, and none is lost with a later one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from benchmarks.shardcast.report import Sample


class Samples:
    """By variant, in the order of their measurement. With a `path`, those of earlier pieces too, and each new one is added."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._found: dict[str, list[Sample]] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                fields = json.loads(line)
                self._found.setdefault(fields.pop("variant"), []).append(_sample(fields))

    def add(self, variant: str, sample: Sample) -> None:
        """Keep one more."""
        self._found.setdefault(variant, []).append(sample)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"variant": variant, **asdict(sample)}) + "\n")

    def of(self, variants: Iterable[str]) -> dict[str, list[Sample]]:
        """Those of these variants, and of others that earlier pieces measured."""
        names = dict.fromkeys([*variants, *self._found])
        return {name: self._found[name] for name in names if name in self._found}


def _sample(fields: dict[str, object]) -> Sample:
    worker_s = fields.pop("worker_s")
    assert isinstance(worker_s, list)
    return Sample(tuple(worker_s), **fields)  # type: ignore[arg-type]
