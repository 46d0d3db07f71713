"""Which runs there are, which are missing, and one of them as a process of its own makes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.staleness.lab import Setting, train


def one(name: str, lag: int, seed: int, setting: Setting) -> dict[str, Any]:
    """A run, for a process of its own."""
    import torch

    from trainer.losses import make_objective

    torch.set_num_threads(1)
    outcome = train(make_objective(*parsed(name)), lag, seed, setting)
    return {"objective": name, "lag": lag, "seed": seed, **asdict(outcome)}


def parsed(name: str) -> tuple[str, dict[str, float]]:
    """`ipo` or, with parameters, `ipo:epsilon=0.1,tau=0`."""
    loss, _, params = name.partition(":")
    pairs = (pair.split("=") for pair in params.split(",") if pair)
    return loss, {key: float(value) for key, value in pairs}


def missing(
    runs: list[dict[str, Any]], names: list[str], lags: list[int], seeds: int
) -> Iterator[tuple[str, int, int]]:
    """Runs that are asked for and not there yet."""
    there = {(run["objective"], run["lag"], run["seed"]) for run in runs}
    yield from ((n, lag, seed) for lag in lags for n in names for seed in range(seeds) if (n, lag, seed) not in there)


def load(path: Path, setting: Setting) -> dict[str, Any]:
    """What was run before. A file of another setting is refused: its runs are no part of the same picture."""
    if not path.exists():
        return {"setting": asdict(setting), "runs": []}
    stored: dict[str, Any] = json.loads(path.read_text())
    if stored["setting"] != asdict(setting):
        raise SystemExit(f"{path} holds runs of {stored['setting']}: choose another --out")
    return stored
