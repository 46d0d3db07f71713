"""Running the checks in order, and the verdict that comes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from coordinator.verification.checks.base import Check, CheckResult, Claim, ModelFreeCheck
from coordinator.verification.checks.form import FormCheck
from coordinator.verification.checks.logprob import LogprobCheck
from coordinator.verification.checks.proof import ProofCheck
from coordinator.verification.checks.seed import SeedCheck
from coordinator.verification.checks.termination import EosCheck, TerminationCheck
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
    metrics: dict[str, float] = {}
    screened = _first_failure([(check.reason, partial(check, claim)) for check in MODEL_FREE], metrics)
    if screened is not None or prefill is None:
        return screened or Verdict(Outcome.ACCEPTED, audited=False, metrics=metrics)
    _refuse_unusable(claim, prefill)
    checks = [(check.reason, partial(check, claim, prefill)) for check in prefill_checks(thresholds)]
    verdict = _first_failure(checks, metrics) or Verdict(Outcome.ACCEPTED, metrics=metrics)
    return replace(
        verdict,
        audited=True,
        old_logprobs=tuple(map(float, prefill.logprobs_T)),
        entropies=tuple(map(float, prefill.entropies_T)),
    )


def _refuse_unusable(claim: Claim, prefill: PrefillResult) -> None:
    tokens = len(claim.rollout.token_ids)
    if len(prefill) != tokens:
        raise OurFault(f"the prefill has {len(prefill)} positions for {tokens} tokens")
    if not prefill.finite:
        raise OurFault("the prefill is not finite: the version's weights or this device are broken")


def _first_failure(
    checks: Iterable[tuple[RejectionReason, Callable[[], CheckResult]]], metrics: dict[str, float]
) -> Verdict | None:
    """Run checks until one fails; each adds its numbers to `metrics`."""
    for reason, check in checks:
        result = _guarded(reason, check)
        metrics.update(result.metrics)
        if not result.passed:
            return Verdict(Outcome.REJECTED, reason, result.detail, audited=False, metrics=metrics)
    return None


def _guarded(reason: RejectionReason, check: Callable[[], CheckResult]) -> CheckResult:
    try:
        return check()
    except RollswarmError:
        raise
    except Exception as error:
        raise OurFault(f"the {reason} check broke with {type(error).__name__}: {error}") from error
