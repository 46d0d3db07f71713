"""Running the checks in order, and the verdict that comes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from coordinator.verification.checks.base import Check, CheckResult, Claim, ModelFreeCheck
from coordinator.verification.checks.form import FormCheck
from coordinator.verification.checks.logprob import LogprobCheck
from coordinator.verification.checks.proof import ProofCheck
from coordinator.verification.checks.seed import SeedCheck
from coordinator.verification.checks.termination import EosCheck, TerminationCheck
from coordinator.verification.pooled import Pooled
from coordinator.verification.pooling import Statistic, normalised
from coordinator.verification.thresholds import Thresholds
from protocol.errors import OurFault, RollswarmError
from protocol.rollout import Outcome, RejectionReason, Verdict

if TYPE_CHECKING:
    from coordinator.verification.prefill import PrefillResult

MODEL_FREE: tuple[ModelFreeCheck, ...] = (FormCheck(), TerminationCheck())


def prefill_checks(thresholds: Thresholds) -> tuple[Check, ...]:
    """The checks that compare with our prefill, in order."""
    return EosCheck(thresholds), ProofCheck(thresholds), LogprobCheck(thresholds), SeedCheck(thresholds)


def run_checks(claim: Claim, prefill: PrefillResult | None, thresholds: Thresholds) -> Verdict:
    """ACCEPTED, or REJECTED by the first check that fails; the reward is the caller's to fill in.

    Without a prefill only the checks that need no model run, and an acceptance says `audited` False: screen a claim so
    before prefilling it, too. Raises OurFault if the prefill is not finite or a check breaks: never a rejection.
    """
    findings = _Findings()
    screened = findings.first_failure([(check.reason, partial(check, claim)) for check in MODEL_FREE])
    if screened is not None or prefill is None:
        return screened or findings.verdict(Outcome.ACCEPTED)
    _refuse_unusable(claim, prefill)
    checks = [(check.reason, partial(check, claim, prefill)) for check in prefill_checks(thresholds)]
    verdict = findings.first_failure(checks) or findings.verdict(Outcome.ACCEPTED)
    return replace(
        verdict,
        audited=True,
        old_logprobs=tuple(map(float, prefill.logprobs_T)),
        entropies=tuple(map(float, prefill.entropies_T)),
        observations=_observations(findings.statistics, thresholds.pooled),
    )


def _observations(statistics: Sequence[Statistic], pooled: Pooled) -> dict[str, float]:
    """What the tests over many rollouts take from this one."""
    found = {test.name: normalised(test, statistics) for test in pooled.tests}
    return {name: value for name, value in found.items() if value is not None}


def _refuse_unusable(claim: Claim, prefill: PrefillResult) -> None:
    tokens = len(claim.rollout.token_ids)
    if len(prefill) != tokens:
        raise OurFault(f"the prefill has {len(prefill)} positions for {tokens} tokens")
    if not prefill.finite:
        raise OurFault("the prefill is not finite: the version's weights or this device are broken")


@dataclass(slots=True)
class _Findings:
    """What the checks found so far."""

    metrics: dict[str, float] = field(default_factory=dict)
    admitted: dict[str, float] = field(default_factory=dict)
    statistics: list[Statistic] = field(default_factory=list)

    def first_failure(self, checks: Iterable[tuple[RejectionReason, Callable[[], CheckResult]]]) -> Verdict | None:
        """Run checks until one fails; each adds its numbers."""
        for reason, check in checks:
            result = _guarded(reason, check)
            self.metrics |= result.metrics
            self.admitted |= result.admitted
            self.statistics += result.statistics
            if not result.passed:
                return self.verdict(Outcome.REJECTED, reason, result.detail)
        return None

    def verdict(self, outcome: Outcome, reason: RejectionReason | None = None, detail: str = "") -> Verdict:
        return Verdict(outcome, reason, detail, audited=False, metrics=self.metrics, admitted=self.admitted)


def _guarded(reason: RejectionReason, check: Callable[[], CheckResult]) -> CheckResult:
    try:
        return check()
    except RollswarmError:
        raise
    except Exception as error:
        raise OurFault(f"the {reason} check broke with {type(error).__name__}: {error}") from error
