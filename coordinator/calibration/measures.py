"""What is measured of one honest rollout: the numbers that the checks compare with thresholds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from coordinator.verification.checks.proof import chunk_agreements
from coordinator.verification.pooled import NEAR_TIE_NATS
from protocol import toploc
from protocol.rollout import Rollout

if TYPE_CHECKING:
    from coordinator.verification.prefill import PrefillResult


@dataclass(frozen=True, slots=True)
class ChunkMeasure:
    """One proof chunk of `tokens` tokens: mismatches of 128 numbers, mantissa errors in units of the last place."""

    tokens: int
    exponent_mismatches: float
    sign_mismatches: float
    mantissa_mean: float
    mantissa_median: float


@dataclass(frozen=True, slots=True)
class Measure:
    """One rollout of `tokens` tokens. Gaps are |claimed - ours| and margins what the seed replay loses by, in nats.
    `near_ties`: places where two tokens came near one another; `near_ties_lost`: where the second best was taken."""

    engine: str
    verifier: str
    tokens: int
    chunks: tuple[ChunkMeasure, ...]
    gap_median: float
    gap_max: float
    margin_sum: float
    margin_max: float
    gap_mean: float
    near_ties: int
    near_ties_lost: int


def measure(rollout: Rollout, prefill: PrefillResult, *, engine: str, verifier: str) -> Measure:
    """Compare an honest rollout with a prefill of it. `engine` and `verifier` name the settings of either side."""
    gaps_T = np.abs(np.array(rollout.logprobs) - prefill.logprobs_T)
    return Measure(
        engine=engine,
        verifier=verifier,
        tokens=len(rollout.token_ids),
        chunks=tuple(_chunk(end - start, agreement) for start, end, agreement in chunk_agreements(rollout, prefill)),
        gap_median=float(np.median(gaps_T)),
        gap_max=float(gaps_T.max()),
        margin_sum=float(prefill.margins_T.sum()),
        margin_max=float(prefill.margins_T.max()),
        gap_mean=float(gaps_T.mean()),
        near_ties=int(prefill.near_T.sum()),
        near_ties_lost=int((prefill.near_T & (prefill.margins_T > 0) & (prefill.margins_T <= NEAR_TIE_NATS)).sum()),
    )


def by_setting(measures: Iterable[Measure]) -> dict[tuple[str, str], list[Measure]]:
    """Measures by (engine, verifier), in the order in which these first appear."""
    settings: dict[tuple[str, str], list[Measure]] = {}
    for item in measures:
        settings.setdefault((item.engine, item.verifier), []).append(item)
    return settings


def _chunk(tokens: int, agreement: toploc.ChunkAgreement) -> ChunkMeasure:
    return ChunkMeasure(
        tokens,
        agreement.exponent_mismatches,
        agreement.sign_mismatches,
        agreement.mantissa_mean,
        agreement.mantissa_median,
    )
