"""Seed replay: the tokens are those that the issued seed selects from the claimed version's logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from coordinator.verification.checks.base import CheckResult, Claim
from coordinator.verification.pooled import NEAR_TIE_NATS, NEAR_TIES, NEAR_TIES_LOST, SEED_MARGIN
from coordinator.verification.pooling import Statistic
from coordinator.verification.thresholds import Thresholds
from protocol.rollout import SEED_MARGIN_MEAN, RejectionReason

if TYPE_CHECKING:
    from coordinator.verification.prefill import PrefillResult


class SeedCheck:
    """No token loses the replay by more than numerics explain, nor do all together.

    A wrong seed that happens to select the same tokens passes: the rollout is then, bit for bit, the honest one.
    """

    reason = RejectionReason.SEED

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds

    def __call__(self, claim: Claim, prefill: PrefillResult) -> CheckResult:
        by_model_T = np.array(claim.rollout.loss_mask)
        margins_T = np.where(by_model_T, prefill.margins_T, 0.0)
        tokens, total = int(by_model_T.sum()), float(margins_T.sum())
        admitted = self._thresholds.seed_sum_allowed(tokens)
        near_T = by_model_T & prefill.near_T
        result = CheckResult(
            True,
            metrics={
                "seed_margin_max": float(margins_T.max()),
                SEED_MARGIN_MEAN: total / tokens,
                "seed_mismatches": float(np.count_nonzero(margins_T)),
                NEAR_TIES: float(np.count_nonzero(near_T)),
                NEAR_TIES_LOST: float(np.count_nonzero(near_T & (margins_T > 0.0) & (margins_T <= NEAR_TIE_NATS))),
            },
            admitted={
                "seed_margin_max": self._thresholds.seed_margin_max,
                SEED_MARGIN_MEAN: admitted / tokens,
            },
            statistics=(Statistic(SEED_MARGIN, total / tokens, tokens),),
        )
        index = int(margins_T.argmax())
        if margins_T[index] > self._thresholds.seed_margin_max:
            return result.failing(
                f"token {index} is {claim.rollout.token_ids[index]}, but the issued seed selects {prefill.winners_T[index]}: "
                f"it loses by {margins_T[index]:.2f}, at most {self._thresholds.seed_margin_max:g} is admitted; sample with "
                f"the lease's seed at temperature {claim.sampling.temperature:g}, without top-p or top-k"
            )
        if total > admitted:
            return result.failing(
                f"the tokens lose the replay of the issued seed by {total:.2f} together, at most {admitted:.2f} is admitted; "
                "check temperature, top-p and top-k"
            )
        return result
