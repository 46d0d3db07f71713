"""Thresholds from honest rollouts: calibrated on one half of them, tried on the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from coordinator.calibration.measures import ChunkMeasure, Measure
from coordinator.calibration.tails import Tail, fit_tail
from coordinator.verification.thresholds import ChunkThresholds, Thresholds
from protocol.errors import UserError

LENGTH_CLASSES = (1, 5, 16, 32)  # chunks of so many tokens or more
# The numbers of a chunk, and the steps in which they come.
_CHUNK_NUMBERS = {"exponent_mismatches": 1.0, "sign_mismatches": 1.0, "mantissa_mean": 0.0, "mantissa_median": 1.0}
_FEWEST = 30
# A rollout fails by any of: four numbers of a chunk, two of log-probs, two of the replay, the EOS's probability.
_WAYS = 9


@dataclass(frozen=True, slots=True)
class Fit:
    """`thresholds`, and the evidence: the tail behind each (by its name), how many rollouts made and tried them, and how
    many of those tried exceed them (by name; honest rollouts, so none should)."""

    thresholds: Thresholds
    tails: dict[str, Tail]
    calibrated_on: int
    tried_on: int
    exceeded: dict[str, int]


def split(keys: Sequence[str]) -> tuple[list[int], list[int]]:
    """Indices for calibration and for trial: about half each, by a digest of the key, whatever the order."""
    halves: tuple[list[int], list[int]] = ([], [])
    for index, key in enumerate(keys):
        halves[sha256(key.encode()).digest()[0] & 1].append(index)
    return halves


def fit(calibration: Sequence[Measure], trial: Sequence[Measure], *, probability: float, source: str) -> Fit:
    """Thresholds that an honest rollout exceeds with `probability` at most, all ways together.

    Raises UserError if a length class has too few chunks to say anything.
    """
    each = probability / _WAYS
    tails: dict[str, Tail] = {}

    def admitted(name: str, values: Iterable[float], unit: float = 0.0) -> float:
        tails[name] = fit_tail(list(values), unit=unit)
        return max(0.0, tails[name].exceeded_with(each))

    gap_max = admitted("logprob_gap_max", (item.gap_max for item in calibration))
    margin_max = admitted("seed_margin_max", (item.margin_max for item in calibration))
    thresholds = Thresholds(
        chunks=tuple(_chunk_thresholds(calibration, index, admitted) for index in range(len(LENGTH_CLASSES))),
        logprob_gap_median_max=max(
            _of_long_ones(calibration, [item.gap_median for item in calibration]),
            admitted("logprob_gap_median_max", (item.gap_median - gap_max / item.tokens for item in calibration)),
        ),
        logprob_gap_max=gap_max,
        seed_margin_max=margin_max,
        seed_margin_mean_max=max(
            _of_long_ones(calibration, [item.margin_sum / item.tokens for item in calibration]),
            admitted("seed_margin_mean_max", ((item.margin_sum - margin_max) / item.tokens for item in calibration)),
        ),
        eos_logprob_min=math.log(each),
        source=source,
    )
    exceeded: dict[str, int] = {}
    for item in trial:
        for name in exceeds(item, thresholds):
            exceeded[name] = exceeded.get(name, 0) + 1
    return Fit(thresholds, tails, len(calibration), len(trial), exceeded)


def _of_long_ones(calibration: Sequence[Measure], values: Sequence[float]) -> float:
    """The largest of these averages over a rollout, among those of whole chunks (of the longest, if there are none).

    What a single token adds to an average fades with the length, the honest average does not: a run's completions may be far
    longer than those measured, and must not be held to less than it.
    """
    enough = min(LENGTH_CLASSES[-1], max(item.tokens for item in calibration))
    return max(value for item, value in zip(calibration, values, strict=True) if item.tokens >= enough)


def exceeds(item: Measure, thresholds: Thresholds) -> set[str]:
    """The names of the thresholds that a rollout exceeds: it would be rejected if there are any."""
    found = {
        f"chunks.{name}"
        for chunk in item.chunks
        for name in _CHUNK_NUMBERS
        if getattr(chunk, name) > getattr(thresholds.for_chunk(chunk.tokens), f"{name}_max")
    }
    if item.gap_max > thresholds.logprob_gap_max:
        found.add("logprob_gap_max")
    if item.gap_median > thresholds.logprob_median_allowed(item.tokens):
        found.add("logprob_gap_median_max")
    if item.margin_max > thresholds.seed_margin_max:
        found.add("seed_margin_max")
    if item.margin_sum > thresholds.seed_sum_allowed(item.tokens):
        found.add("seed_margin_mean_max")
    return found


def _chunk_thresholds(
    calibration: Sequence[Measure], index: int, admitted: Callable[[str, Iterable[float], float], float]
) -> ChunkThresholds:
    low = LENGTH_CLASSES[index]
    high = LENGTH_CLASSES[index + 1] if index + 1 < len(LENGTH_CLASSES) else math.inf
    chunks = [chunk for item in calibration for chunk in item.chunks if low <= chunk.tokens < high]
    if len(chunks) < _FEWEST:
        raise UserError(
            f"only {len(chunks)} proof chunks of {low} tokens or more were measured, {_FEWEST} are needed: "
            "calibrate on more rollouts, and on lengths that the run will see"
        )

    def limit(name: str) -> float:
        return admitted(f"chunks.{low}.{name}", _values(chunks, name), _CHUNK_NUMBERS[name])

    return ChunkThresholds(
        tokens_min=low,
        exponent_mismatches_max=math.ceil(limit("exponent_mismatches")),
        sign_mismatches_max=math.ceil(limit("sign_mismatches")),
        mantissa_mean_max=limit("mantissa_mean"),
        mantissa_median_max=limit("mantissa_median"),
    )


def _values(chunks: Sequence[ChunkMeasure], name: str) -> list[float]:
    return [float(getattr(chunk, name)) for chunk in chunks]
