"""Termination: a rollout ends where the model ended it, or at the length limit; nobody may cut it at a flattering place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.verification.checks.base import CheckResult, Claim
from coordinator.verification.thresholds import Thresholds
from protocol.rollout import EOS_LOGPROB, Author, RejectionReason, StopReason

if TYPE_CHECKING:
    from coordinator.verification.prefill import PrefillResult


class TerminationCheck:
    """EOS is the last of the model's tokens and nowhere before, or there is none and the limit is reached exactly, or a call
    that has no room for its answer below it."""

    reason = RejectionReason.TERMINATION

    def __call__(self, claim: Claim) -> CheckResult:
        last = claim.rollout.segments[-1]
        if last.author is not Author.MODEL or not last.token_ids:
            return CheckResult.failed("the rollout must end with a token written by the model")
        eos, limit = set(claim.sampling.eos_token_ids), claim.sampling.max_tokens
        by_model = [segment for segment in claim.rollout.segments if segment.author is Author.MODEL]
        if any(eos.intersection(segment.token_ids[:-1]) for segment in by_model):
            return CheckResult.failed("tokens follow an EOS; generation must end at the first one")
        written = len(claim.rollout.token_ids)
        ends_with_eos = last.token_ids[-1] in eos
        if claim.rollout.stop_reason is StopReason.EOS and not ends_with_eos:
            return CheckResult.failed(f"it claims to end by EOS, but its last token is {last.token_ids[-1]}")
        if claim.rollout.stop_reason is StopReason.LENGTH and ends_with_eos:
            return CheckResult.failed("it claims to end by length, but its last token is an EOS")
        if not ends_with_eos and written != limit and not _cut(claim):
            return CheckResult.failed(f"it ends without EOS after {written} of {limit} tokens; generate to the end")
        return CheckResult(True)


def _cut(claim: Claim) -> bool:
    """Whether it ends in a call whose answer had no room."""
    return claim.turns is not None and claim.turns.read(claim.rollout.token_ids, claim.sampling).cut


class EosCheck:
    """The EOS that ends it was possible. Whether it was drawn is the seed check's to say."""

    reason = RejectionReason.TERMINATION

    def __init__(self, thresholds: Thresholds) -> None:
        self._logprob_min = thresholds.eos_logprob_min

    def __call__(self, claim: Claim, prefill: PrefillResult) -> CheckResult:
        if claim.rollout.stop_reason is not StopReason.EOS:
            return CheckResult(True)
        logprob = float(prefill.logprobs_T[-1])
        result = CheckResult(True, metrics={EOS_LOGPROB: logprob}, admitted={EOS_LOGPROB: self._logprob_min})
        if logprob >= self._logprob_min:
            return result
        return result.failing(
            f"the EOS at the end has log-prob {logprob:.1f} (at least {self._logprob_min:.1f} is admitted): "
            "the model would not stop here"
        )
