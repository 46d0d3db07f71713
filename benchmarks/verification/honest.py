"""Honest rollouts of the engine that workers run, in every setting that calibration tries: how many are refused?

Seeds and prompts are others than calibration's. Refused is what a run would refuse: by the run's precision, then by float32.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.tables import share_interval
from benchmarks.verification import samples
from benchmarks.verification.measured import Measured, Verifier
from benchmarks.verification.simulate import false_alarms
from coordinator.verification.resident import ResidentModels
from coordinator.verification.thresholds import Thresholds
from worker.calibration import engine_settings, honest_generations

_FIRST_SEED = 7_000


def measure(
    folder: Path, dtype: str, thresholds: Thresholds, *, rollouts: int, tokens: int, eos: Sequence[int]
) -> tuple[list[dict[str, Any]], dict[str, list[Measured]]]:
    """A row for each engine setting and one for all; and what was measured in each."""
    found = dict(_settings(folder, dtype, thresholds, rollouts=rollouts, tokens=tokens, eos=eos))
    everything = [each for measured in found.values() for each in measured]
    return [_row(name, measured) for name, measured in [*found.items(), ("all", everything)]], found


def alarms(
    measured: Mapping[str, Sequence[Measured]], thresholds: Thresholds, *, months: int, rollouts_per_month: int
) -> dict[str, int]:
    """Alarms by test in simulated months of honest workers of all settings, drawn from what was measured."""
    everything = [each for found in measured.values() for each in found]
    return false_alarms(everything, thresholds.pooled, months=months, rollouts_per_month=rollouts_per_month)


def _settings(
    folder: Path, dtype: str, thresholds: Thresholds, *, rollouts: int, tokens: int, eos: Sequence[int]
) -> Iterator[tuple[str, list[Measured]]]:
    settings = engine_settings(dtype, compiled=False)
    shares = sum(setting.share for setting in settings)
    for number, setting in enumerate(settings):
        count = -(-rollouts * setting.share // shares)
        asked = samples.mixed_requests(folder, count=int(count), tokens=tokens, eos=eos, seed=_FIRST_SEED + number)
        written = asyncio.run(honest_generations(folder, setting, asked, kv_cache_gib=None))
        models = ResidentModels(lambda _digest: folder, max_resident=1, dtype=getattr(torch, dtype))
        yield setting.name, Verifier(models, thresholds).measure(samples.claims(written, asked, folder))
        print(f"honest, {setting.name}: {len(asked)} rollouts", flush=True)


def _row(name: str, measured: Sequence[Measured]) -> dict[str, Any]:
    refused = [each.reason for each in measured if not each.accepted]
    return {
        "engine": name,
        "rollouts": len(measured),
        "tokens": sum(each.tokens for each in measured),
        "refused": len(refused),
        "refused_ci95": list(share_interval(len(refused), len(measured))),
        "reasons": " ".join(sorted(set(refused))),
    }
