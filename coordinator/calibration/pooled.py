"""Bounds for the tests over many rollouts: what honest ones average, whatever engine wrote and whatever verifier read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

from coordinator.calibration.measures import Measure, by_setting
from coordinator.verification.pooled import (
    COMPARISONS,
    LOGPROB_GAP,
    NUMERIC,
    PROOF_EXPONENT,
    PROOF_MANTISSA,
    SEED_MARGIN,
    STRIKE,
    Pooled,
    PooledClass,
    PooledTest,
)
from coordinator.verification.pooling import Statistic, calibrate, normalised
from protocol.errors import UserError

# Fine where it matters: the fewer tokens, the larger the honest mean, and no class may stand on its longer half.
LENGTH_CLASSES = (1, 2, 3, 5, 8, 16, 32)
# For engines and devices that were not measured, beyond the largest mean of those that were.
HEADROOM = 1.15
# How fine a difference each test takes seriously: where honest rollouts agree exactly, the first rounding is no fraud.
_RESOLUTION = {PROOF_MANTISSA: 0.05, PROOF_EXPONENT: 0.2, LOGPROB_GAP: 0.001, SEED_MARGIN: 0.0002}
_FEWEST = 20

# One rollout's statistics; a setting's rollouts.
Rollouts = Sequence[Sequence[Statistic]]


def fit_pooled(measures: Iterable[Measure], *, false_bans: float, rollouts_per_month: float, source: str) -> Pooled:
    """The tests for a run. `false_bans`: expected per worker-month of that many rollouts, by all tests together.

    Raises UserError if no setting has enough rollouts.
    """
    settings = by_setting(measures)
    ties = sum(item.near_ties for found in settings.values() for item in found)
    lost = sum(item.near_ties_lost for found in settings.values() for item in found)
    tests = fit_tests(
        [[statistics_of(item) for item in found] for found in settings.values()], alpha=false_bans / len(NUMERIC)
    )
    return replace(
        COMPARISONS,
        observations_per_month=rollouts_per_month,
        near_tie_share=(lost + 1) / (ties + 2),
        tests=(*tests, *COMPARISONS.tests),
        source=source,
    )


def fit_tests(settings: Sequence[Rollouts], *, alpha: float) -> tuple[PooledTest, ...]:
    """The tests against our prefill, each with bounds that hold for every setting."""
    return tuple(PooledTest(name, STRIKE, alpha, _classes(settings, name)) for name in NUMERIC)


def mean_in_trial(pooled: Pooled, measures: Iterable[Measure]) -> dict[str, float]:
    """Y of other honest rollouts, on average, by test: below 1 if the bounds are right."""
    values: dict[str, list[float]] = {}
    for item in measures:
        for test in pooled.tests:
            if (value := normalised(test, statistics_of(item))) is not None:
                values.setdefault(test.name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def statistics_of(item: Measure) -> list[Statistic]:
    """What the checks would take from this rollout."""
    by_chunk = [
        each
        for chunk in item.chunks
        for each in (
            Statistic(PROOF_MANTISSA, chunk.mantissa_mean, chunk.tokens),
            Statistic(PROOF_EXPONENT, chunk.exponent_mismatches, chunk.tokens),
        )
    ]
    return [
        *by_chunk,
        Statistic(LOGPROB_GAP, item.gap_mean, item.tokens),
        Statistic(SEED_MARGIN, item.margin_sum / item.tokens, item.tokens),
    ]


def _classes(settings: Sequence[Rollouts], name: str) -> tuple[PooledClass, ...]:
    """Bounds by length class. A class without enough numbers is held to those of the next shorter one, which are wider; if
    there is none, it is left out, and what is so short is not judged."""
    found: list[PooledClass] = []
    for low, high in zip(LENGTH_CLASSES, (*LENGTH_CLASSES[1:], None), strict=True):
        samples = [_values(rollouts, name, low, high) for rollouts in settings]
        if usable := [values for values in samples if len(values) >= _FEWEST]:
            found.append(calibrate(usable, tokens_min=low, headroom=HEADROOM, resolution=_RESOLUTION[name]))
    if not found:
        raise UserError(f"too few rollouts to bound {name}: {_FEWEST} of one setting and length class are needed")
    return tuple(found)


def _values(rollouts: Rollouts, name: str, low: int, high: int | None) -> list[float]:
    return [
        each.value
        for statistics in rollouts
        for each in statistics
        if each.test == name and each.tokens >= low and (high is None or each.tokens < high)
    ]


def pooled_lines(pooled: Pooled) -> list[str]:
    """As TOML, behind the other thresholds."""
    lines = ["", "[pooled]", *_fields(pooled, ("observations_per_month", "watch", "near_tie_share", "source"))]
    for test in pooled.tests:
        lines += ["", "[[pooled.tests]]", *_fields(test, ("name", "action", "alpha"))]
        for each in test.classes:
            lines += ["[[pooled.tests.classes]]", *_fields(each, ("tokens_min", "floor", "mean", "cap"))]
    return lines


def _fields(values: object, names: Sequence[str]) -> list[str]:
    return [f"{name} = {json.dumps(getattr(values, name))}" for name in names]
