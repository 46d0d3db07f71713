"""Thresholds from measures: honest ones pass, shifted ones don't, and what is too little is said."""

from dataclasses import replace

import numpy as np
import pytest

from coordinator.calibration.fit import LENGTH_CLASSES, exceeds, fit, split
from coordinator.calibration.measures import ChunkMeasure, Measure
from coordinator.calibration.report import evidence, to_toml, write
from coordinator.verification.thresholds import Thresholds
from protocol.errors import UserError


def honest(count: int, seed: int = 0) -> list[Measure]:
    """Made-up measures with light tails, of every length class."""
    draw = np.random.default_rng(seed)
    measures = []
    for number in range(count):
        tokens = (3, 8, 20, 40)[number % 4]
        lengths = [32, tokens - 32] if tokens > 32 else [tokens]
        chunks = tuple(
            ChunkMeasure(length, draw.poisson(2), draw.poisson(0.5), draw.gamma(20, 0.05), draw.gamma(20, 0.04))
            for length in lengths
        )
        gaps, margins = draw.exponential(0.02, tokens), draw.exponential(0.001, tokens)
        measures.append(
            Measure(
                engine="16 at once",
                verifier="float32",
                tokens=tokens,
                chunks=chunks,
                gap_median=np.median(gaps),
                gap_max=gaps.max(),
                margin_sum=margins.sum(),
                margin_max=margins.max(),
                gap_mean=gaps.mean(),
                near_ties=2,
                near_ties_lost=number % 3 == 0,
            )
        )
    return measures


def test_honest_trials_pass_and_shifted_ones_do_not() -> None:
    fitted = fit(honest(800), honest(800, seed=1), probability=1e-5, source="made up")
    assert (fitted.calibrated_on, fitted.tried_on, fitted.exceeded) == (800, 800, {})
    assert [chunk.tokens_min for chunk in fitted.thresholds.chunks] == list(LENGTH_CLASSES)
    plain = honest(8, seed=2)[3]
    cheats = {
        "chunks.mantissa_mean": replace(plain, chunks=(replace(plain.chunks[0], mantissa_mean=20.0),)),
        "chunks.exponent_mismatches": replace(plain, chunks=(replace(plain.chunks[0], exponent_mismatches=60),)),
        "logprob_gap_max": replace(plain, gap_max=3.0),
        "logprob_gap_median_max": replace(plain, gap_median=1.0),
        "seed_margin_max": replace(plain, margin_max=1.0),
        "seed_margin_mean_max": replace(plain, margin_sum=5.0),
    }
    assert exceeds(plain, fitted.thresholds) == set()
    for name, cheat in cheats.items():
        assert exceeds(cheat, fitted.thresholds) == {name}


def test_a_smaller_probability_gives_wider_thresholds() -> None:
    narrow = fit(honest(400), [], probability=1e-3, source="").thresholds
    wide = fit(honest(400), [], probability=1e-7, source="").thresholds
    assert wide.logprob_gap_max > narrow.logprob_gap_max
    assert wide.for_chunk(32).mantissa_mean_max > narrow.for_chunk(32).mantissa_mean_max


def test_rollouts_far_longer_than_those_measured_are_held_to_no_less_than_the_honest_average() -> None:
    measures = honest(400)
    thresholds = fit(measures, honest(400, seed=1), probability=1e-5, source="made up").thresholds
    long = [item for item in measures if item.tokens >= 32]
    assert thresholds.logprob_median_allowed(10_000) > np.mean([item.gap_median for item in long])
    assert thresholds.seed_sum_allowed(10_000) / 10_000 > np.mean([item.margin_sum / item.tokens for item in long])


def test_a_length_class_without_data_is_named() -> None:
    short = [item for item in honest(400) if item.tokens == 3]
    with pytest.raises(UserError, match="only 0 proof chunks of 5 tokens or more"):
        fit(short, [], probability=1e-5, source="")


def test_halves_depend_on_the_key_alone() -> None:
    keys = [f"setting/{number}" for number in range(1000)]
    mine, others = split(keys)
    assert sorted(mine + others) == list(range(1000)) and 400 < len(mine) < 600
    again = split(keys[::-1])
    assert {keys[::-1][index] for index in again[0]} == {keys[index] for index in mine}


def test_what_is_written_is_what_a_run_file_reads(tmp_path) -> None:
    fitted = fit(honest(400), honest(100, seed=1), probability=1e-5, source='said "so"')
    facts = evidence(fitted, honest(400), {"max_strikes": 3})
    path = write(tmp_path / "calibration", fitted, facts)
    assert Thresholds.from_toml(path) == fitted.thresholds
    assert path.read_text() == to_toml(fitted.thresholds)
    assert {file.name for file in path.parent.iterdir()} == {"thresholds.toml", "evidence.json", "tails.png"}
    assert facts["settings"][0]["rollouts"] == 400 and facts["tails"]["logprob_gap_max"]["values"] == 400
