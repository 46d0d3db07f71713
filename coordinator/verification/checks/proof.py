"""Proof: the hidden states that chose the tokens are those of the claimed weights, prompt and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.verification.checks.base import CheckResult, Claim
from coordinator.verification.checks.form import proof_chunks
from coordinator.verification.pooled import PROOF_EXPONENT, PROOF_MANTISSA
from coordinator.verification.pooling import Statistic
from coordinator.verification.thresholds import Thresholds
from protocol import toploc
from protocol.rollout import RejectionReason, Rollout

if TYPE_CHECKING:
    from coordinator.verification.prefill import PrefillResult


@dataclass(frozen=True, slots=True)
class _Measure:
    """One number of a chunk beside the largest admitted one."""

    words: str
    value: float
    admitted: float

    @property
    def excess(self) -> float:
        return self.value / self.admitted if self.admitted > 0 else float(self.value > 0) * 2


class ProofCheck:
    """Every chunk's exponents, signs and mantissas within the thresholds of its length class."""

    reason = RejectionReason.PROOF

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds

    def __call__(self, claim: Claim, prefill: PrefillResult) -> CheckResult:
        nearest: dict[str, _Measure] = {}  # to their limits, of all chunks
        worst: tuple[float, str] = (0.0, "")
        statistics: list[Statistic] = []
        for start, end, agreement in chunk_agreements(claim.rollout, prefill):
            statistics += (
                Statistic(PROOF_MANTISSA, agreement.mantissa_mean, end - start),
                Statistic(PROOF_EXPONENT, agreement.exponent_mismatches, end - start),
            )
            for name, measure in self._measures(agreement, end - start).items():
                if name not in nearest or measure.excess > nearest[name].excess:
                    nearest[name] = measure
                if measure.excess > worst[0]:
                    worst = (measure.excess, _detail(start, end, agreement, measure))
        result = CheckResult(
            True,
            metrics={f"proof_{name}": float(measure.value) for name, measure in nearest.items()},
            admitted={f"proof_{name}": float(measure.admitted) for name, measure in nearest.items()},
            statistics=tuple(statistics),
        )
        return result if worst[0] <= 1.0 else result.failing(worst[1])

    def _measures(self, agreement: toploc.ChunkAgreement, tokens: int) -> dict[str, _Measure]:
        limits = self._thresholds.for_chunk(tokens)
        return {
            "exponent_mismatches": _Measure(
                "exponent mismatches", agreement.exponent_mismatches, limits.exponent_mismatches_max
            ),
            "sign_mismatches": _Measure("sign mismatches", agreement.sign_mismatches, limits.sign_mismatches_max),
            "mantissa_mean": _Measure("mean mantissa error", agreement.mantissa_mean, limits.mantissa_mean_max),
            "mantissa_median": _Measure("median mantissa error", agreement.mantissa_median, limits.mantissa_median_max),
        }


def chunk_agreements(rollout: Rollout, prefill: PrefillResult) -> list[tuple[int, int, toploc.ChunkAgreement]]:
    """For each chunk, which tokens it is of, from start to before end, and how its proof agrees with the prefill."""
    chunks = list(proof_chunks(rollout))
    agreements = toploc.compare_many(
        [proof for _, _, proof in chunks], [prefill.hidden_bits_TD[start:end] for start, end, _ in chunks]
    )
    return [(start, end, agreement) for (start, end, _), agreement in zip(chunks, agreements, strict=True)]


def _detail(start: int, end: int, agreement: toploc.ChunkAgreement, measure: _Measure) -> str:
    return (
        f"activations of tokens [{start}, {end}) do not match the claimed version: {measure.words} {measure.value:.3g} "
        f"of {agreement.compared} compared, at most {measure.admitted:.3g} admitted; check the weights' digest, the "
        "engine's precision, and that tokens and prompt are unchanged"
    )
