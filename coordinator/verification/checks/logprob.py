"""Log-probabilities: what the worker logged is what the claimed version gives, at the lease's temperature."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from coordinator.verification.checks.base import CheckResult, Claim
from coordinator.verification.pooled import LOGPROB_GAP
from coordinator.verification.pooling import Statistic
from coordinator.verification.thresholds import Thresholds
from protocol.rollout import RejectionReason

if TYPE_CHECKING:
    from coordinator.verification.prefill import PrefillResult


class LogprobCheck:
    """Median and largest |claimed - ours| over the model's tokens."""

    reason = RejectionReason.LOGPROB

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds

    def __call__(self, claim: Claim, prefill: PrefillResult) -> CheckResult:
        by_model_T = np.array(claim.rollout.loss_mask)
        gaps_T = np.abs(np.array(claim.rollout.logprobs) - prefill.logprobs_T)
        gaps = gaps_T[by_model_T]
        median, largest = float(np.median(gaps)), float(gaps.max())
        admitted = self._thresholds.logprob_median_allowed(len(gaps))
        result = CheckResult(
            True,
            metrics={"logprob_gap_median": median, "logprob_gap_max": largest},
            admitted={"logprob_gap_median": admitted, "logprob_gap_max": self._thresholds.logprob_gap_max},
            statistics=(Statistic(LOGPROB_GAP, float(gaps.mean()), len(gaps)),),
        )
        if largest > self._thresholds.logprob_gap_max:
            index = int(np.where(by_model_T, gaps_T, -1.0).argmax())
            return result.failing(
                f"the log-prob of token {index} is {claim.rollout.logprobs[index]:.3f}, ours {prefill.logprobs_T[index]:.3f}"
                f" (gap at most {self._thresholds.logprob_gap_max:g}): log logits / temperature, without noise or truncation"
            )
        if median > admitted:
            return result.failing(
                f"claimed log-probs differ from ours by {median:.3f} in the median, at most {admitted:.3f} admitted; "
                "check the weights, the temperature and the engine's precision"
            )
        return result
