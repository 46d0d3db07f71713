"""Measured rollouts as JSON, so that bounds can be tried without measuring again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.pooling.measure import Measured
from coordinator.verification.pooling import Statistic


def save(path: Path, measured: Mapping[str, Sequence[Measured]]) -> None:
    path.write_text(
        json.dumps({name: [dataclasses.asdict(each) for each in found] for name, found in measured.items()})
    )


def load(path: Path) -> dict[str, list[Measured]]:
    return {
        name: [
            Measured(**{**each, "statistics": tuple(Statistic(**one) for one in each["statistics"])}) for each in found
        ]
        for name, found in json.loads(path.read_text()).items()
    }
