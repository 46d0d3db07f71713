"""Medians with intervals, and a table that a person reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_RESAMPLES = 4000


def bootstrap_median(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The 95 % percentile-bootstrap interval of the median."""
    sample = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(seed).choice(sample, size=(_RESAMPLES, len(sample)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return float(low), float(high)


def share_interval(hits: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share of which `hits` of `count` were seen (Wilson 1927)."""
    z, share = 1.96, hits / count
    middle, width = share + z * z / (2 * count), z * math.sqrt(share * (1 - share) / count + z * z / (4 * count**2))
    scale = 1 + z * z / count
    return max(0.0, (middle - width) / scale), min(1.0, (middle + width) / scale)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of the same fields, aligned; numbers with four significant digits."""
    if not rows:
        return "(nothing)"
    names = list(rows[0])
    cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return " to ".join(_cell(item) for item in value)
    return str(value)
