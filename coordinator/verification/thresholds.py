"""How far an honest rollout may be from our prefill of it.

Values are measured: run the engine honestly, prefill what it wrote, take the largest difference seen and add head-room.
They belong to a model, an engine precision and a verifier precision; `coordinator calibrate` writes them.

A rollout of few tokens is noisier than a long one, in two ways. Its proof chunks are short, so that their top 128
numbers reach into small magnitudes: chunks have thresholds by length class. And its averages are over few tokens: sums
over T tokens may reach one token's tail plus T times the mean, medians the long-run median plus a T-th of the tail.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.verification.fields import checked, tables, texts
from coordinator.verification.pooled import COMPARISONS, Pooled
from protocol.errors import UserError

if TYPE_CHECKING:
    from coordinator.config import VerificationSection

_OPTIONAL = frozenset({"pooled", "hardware"})
_SIGNED = frozenset({"eos_logprob_min"})


@dataclass(frozen=True, slots=True)
class ChunkThresholds:
    """What a proof chunk of `tokens_min` tokens or more may differ by. Counts are of k = 128 compared numbers, mantissa
    errors in units of the last of bf16's 7 bits. All are the largest admitted values."""

    tokens_min: int
    exponent_mismatches_max: int
    sign_mismatches_max: int
    mantissa_mean_max: float
    mantissa_median_max: float


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Largest admitted differences; log-probabilities and margins in nats.

    `chunks`: by ascending `tokens_min`, the first 1. `logprob_gap_median_max`, `logprob_gap_max`: of |claimed - ours|,
    the median of a long rollout and any single token. `seed_margin_max`, `seed_margin_mean_max`: by how much a claimed
    token may lose the seed replay, once and per token on average. `eos_logprob_min`: an EOS less likely than that ends
    no honest rollout (a seeded draw hits it once in exp(-eos_logprob_min) positions). `source`: the evidence, in words.
    `pooled`: tests over all of a worker's rollouts; without them, workers are still compared with one another.
    `hardware`: the hardware classes that they were measured on, which need no shadow.
    """

    chunks: tuple[ChunkThresholds, ...]
    logprob_gap_median_max: float
    logprob_gap_max: float
    seed_margin_max: float
    seed_margin_mean_max: float
    eos_logprob_min: float
    source: str
    pooled: Pooled = COMPARISONS
    hardware: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        starts = [chunk.tokens_min for chunk in self.chunks]
        if not starts or starts[0] != 1 or starts != sorted(set(starts)):
            raise UserError(f"chunks: tokens_min must ascend from 1, got {starts}")

    def for_chunk(self, tokens: int) -> ChunkThresholds:
        """The class of a proof chunk with that many tokens (at least 1)."""
        return next(chunk for chunk in reversed(self.chunks) if chunk.tokens_min <= tokens)

    def logprob_median_allowed(self, tokens: int) -> float:
        """The largest admitted median gap over that many tokens."""
        return self.logprob_gap_median_max + self.logprob_gap_max / tokens

    def seed_sum_allowed(self, tokens: int) -> float:
        """The largest admitted sum of margins over that many tokens."""
        return self.seed_margin_max + self.seed_margin_mean_max * tokens

    @classmethod
    def from_mapping(cls, fields: Mapping[str, Any]) -> Thresholds:
        """Thresholds from parsed TOML or JSON. Raises UserError that names the field."""
        values = checked(fields, cls, "thresholds", optional=_OPTIONAL, signed=_SIGNED)
        values["chunks"] = tuple(
            ChunkThresholds(**checked(chunk, ChunkThresholds, f"thresholds: chunks[{index}]"))
            for index, chunk in enumerate(tables(values["chunks"], "thresholds: chunks"))
        )
        if "hardware" in values:
            values["hardware"] = texts(values["hardware"], "thresholds: hardware")
        if "pooled" in values:
            values["pooled"] = Pooled.from_mapping(values["pooled"])
        return cls(**values)

    @classmethod
    def from_toml(cls, path: Path) -> Thresholds:
        """Thresholds from a TOML file. Raises UserError that names the file and the field."""
        try:
            return cls.from_mapping(tomllib.loads(path.read_text(encoding="utf-8")))
        except (OSError, tomllib.TOMLDecodeError, UserError) as error:
            raise UserError(f"{path}: {error}") from error

    def to_mapping(self) -> dict[str, Any]:
        """What `from_mapping` reads."""
        return dataclasses.asdict(self)


def thresholds_of(settings: VerificationSection) -> Thresholds:
    """A run's thresholds. Raises UserError if it has none, or they can't be read: a run never starts on guesses."""
    file = settings.thresholds_file
    if file is not None and file.exists():
        return Thresholds.from_toml(file)
    if settings.thresholds:
        return Thresholds.from_mapping(settings.thresholds)
    lacking = "[verification] names no thresholds" if file is None else f"there are no thresholds in {file} yet"
    raise UserError(
        f"{lacking}: `coordinator calibrate --config RUN_FILE` measures them; name its file as thresholds_file"
    )
