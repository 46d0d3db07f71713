"""Claims through the verifier's own prefill and checks: the verdict on each, and what the tests over many take from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.verification.checks import Claim, run_checks
from coordinator.verification.checks.run import prefill_checks
from coordinator.verification.pooling import Statistic
from coordinator.verification.prefill import PrefillResult
from coordinator.verification.resident import PrefillRequest, ResidentModels, prefill_rollouts
from coordinator.verification.thresholds import Thresholds
from protocol.rollout import Outcome, Verdict


@dataclass(frozen=True, slots=True)
class Measured:
    """One rollout: its tokens, why it is rejected ("" if it isn't), and its statistics (none if no prefill was needed)."""

    tokens: int
    reason: str
    statistics: tuple[Statistic, ...]

    @property
    def accepted(self) -> bool:
        return not self.reason


class Verifier:
    """What a coordinator would run, with a run's thresholds. A second look in float32 is left out: it only acquits."""

    def __init__(self, models: ResidentModels, thresholds: Thresholds) -> None:
        self._models = models
        self._thresholds = thresholds

    def measure(self, claims: Sequence[Claim]) -> list[Measured]:
        """What it finds in each claim; what fails without a model is not prefilled."""
        screened = [run_checks(claim, None, self._thresholds) for claim in claims]
        passed = {n: claim for n, claim in enumerate(claims) if screened[n].outcome is Outcome.ACCEPTED}
        found = prefill_rollouts([_to_prefill(claim, n) for n, claim in passed.items()], self._models)
        return [
            self._audited(claim, found[n]) if n in passed else _measured(claim, screened[n], ())
            for n, claim in enumerate(claims)
        ]

    def _audited(self, claim: Claim, prefill: PrefillResult) -> Measured:
        results = [check(claim, prefill) for check in prefill_checks(self._thresholds)]
        statistics = tuple(each for result in results for each in result.statistics)
        return _measured(claim, run_checks(claim, prefill, self._thresholds), statistics)


def _measured(claim: Claim, verdict: Verdict, statistics: tuple[Statistic, ...]) -> Measured:
    assert verdict.outcome is not Outcome.INCONCLUSIVE, verdict.detail
    return Measured(len(claim.rollout.token_ids), str(verdict.reason or ""), statistics)


def _to_prefill(claim: Claim, key: int) -> PrefillRequest:
    rollout = claim.rollout
    return PrefillRequest(
        key, claim.prompt_token_ids, rollout.token_ids, claim.seed, claim.sampling.temperature, rollout.spans
    )
