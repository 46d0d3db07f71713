"""Bounds for the tests over many rollouts, from measures: honest ones stay below, and files say what was found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coordinator.calibration.fit import fit
from coordinator.calibration.measures import ChunkMeasure, Measure
from coordinator.calibration.pooled import fit_pooled, mean_in_trial, statistics_of
from coordinator.calibration.report import to_toml
from coordinator.verification.pooled import COMPARED, NUMERIC, PROOF_MANTISSA, STRIKE
from coordinator.verification.pooling import Evidence, is_alarmed, normalised, observe
from coordinator.verification.thresholds import Thresholds
from protocol.errors import UserError


def honest(count: int, seed: int = 0, scale: float = 1.0, engine: str = "16 at once") -> list[Measure]:
    draw = np.random.default_rng(seed)
    measures = []
    for number in range(count):
        tokens = (3, 8, 20, 40)[number % 4]
        lengths = [32, tokens - 32] if tokens > 32 else [tokens]
        chunks = tuple(
            ChunkMeasure(n, draw.poisson(2 * scale), draw.poisson(0.5), scale * draw.gamma(20, 0.05), 1.0)
            for n in lengths
        )
        gaps, margins = draw.exponential(0.02 * scale, tokens), draw.exponential(0.001, tokens)
        numbers = (float(np.median(gaps)), float(gaps.max()), float(margins.sum()), float(margins.max()))
        measures.append(Measure(engine, "bf16", tokens, chunks, *numbers, float(gaps.mean()), 2, number % 5 == 0))
    return measures


def test_other_honest_rollouts_stay_below_the_bounds() -> None:
    both = honest(400) + honest(400, seed=1, scale=1.3, engine="another")
    pooled = fit_pooled(both, false_bans=0.004, rollouts_per_month=1e5, source="made up")
    assert [test.name for test in pooled.tests] == [*NUMERIC, *COMPARED]
    assert {(test.action, test.alpha) for test in pooled.tests if test.name in NUMERIC} == {(STRIKE, 0.001)}
    assert pooled.near_tie_share == pytest.approx(0.1, abs=0.01) and pooled.observations_per_month == 1e5
    trial = mean_in_trial(pooled, honest(400, seed=2, scale=1.3))
    assert trial.keys() == set(NUMERIC) and all(value < 1.0 for value in trial.values()), "the worst engine counts"


def test_a_shifted_engine_is_found() -> None:
    pooled = fit_pooled(honest(400), false_bans=0.004, rollouts_per_month=1e5, source="made up")
    test = next(test for test in pooled.tests if test.name == PROOF_MANTISSA)
    evidence = Evidence(test.name)
    for item in honest(400, seed=3, scale=1.5):
        evidence = observe(evidence, normalised(test, statistics_of(item)) or 0.0, item.tokens)
        if is_alarmed(evidence, test, pooled):
            break
    assert is_alarmed(evidence, test, pooled) and evidence.observations < 200


def test_what_is_shorter_than_anything_measured_is_not_judged() -> None:
    longer = [item for item in honest(400) if item.tokens > 5]
    pooled = fit_pooled(longer, false_bans=0.004, rollouts_per_month=1e5, source="")
    gap = next(test for test in pooled.tests if test.name == "logprob_gap")
    assert [each.tokens_min for each in gap.classes] == [8, 16, 32]
    assert gap.for_tokens(7) is None and gap.for_tokens(9) == gap.classes[0]
    item = next(item for item in honest(8) if item.tokens == 3)
    assert normalised(gap, statistics_of(item)) is None
    with pytest.raises(UserError, match="too few rollouts to bound proof_mantissa"):
        fit_pooled(honest(8), false_bans=0.004, rollouts_per_month=1e5, source="")


def test_what_is_written_is_what_a_run_file_reads(tmp_path) -> None:
    thresholds = fit(honest(400), [], probability=1e-5, source='said "so"').thresholds
    pooled = fit_pooled(honest(400), false_bans=0.004, rollouts_per_month=1e5, source='said "so"')
    path = tmp_path / "thresholds.toml"
    path.write_text(to_toml(replace(thresholds, pooled=pooled)))
    assert Thresholds.from_toml(path) == replace(thresholds, pooled=pooled)
