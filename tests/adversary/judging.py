"""Cheats' rollouts judged as a verifier judges them: the same checks, against a prefill under the published version."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from coordinator.verification.checks import run_checks
from coordinator.verification.resident import ResidentModels, prefill_rollouts
from protocol.rollout import Outcome, RejectionReason, Verdict
from tests.adversary.attacks.cheat import Cheat
from tests.adversary.batch import write_all
from tests.thresholds import BY_HAND
from tests.unit.coordinator.verification.claims import make_claim, make_request, to_prefill
from worker.engine import Generation, GenerationRequest, Weights

MAX_TOKENS = 40


def make_requests(count: int, *, first: int = 0, max_tokens: int = MAX_TOKENS) -> list[GenerationRequest]:
    """Samples of as many tasks, with prompts of one length and seeds of their own."""
    return [make_request(first + number, max_tokens=max_tokens) for number in range(count)]


def judge(
    generations: Sequence[Generation], requests: Sequence[GenerationRequest], models: ResidentModels
) -> list[Verdict]:
    """A verdict each. What fails without a model is not prefilled, as in the verifier."""
    claims = [make_claim(*pair) for pair in zip(generations, requests, strict=True)]
    screened = [run_checks(claim, None, BY_HAND) for claim in claims]
    passed = {n: claim for n, claim in enumerate(claims) if screened[n].outcome is Outcome.ACCEPTED}
    found = prefill_rollouts([to_prefill(claim, n) for n, claim in passed.items()], models)
    audited = {n: run_checks(claim, found[n], BY_HAND) for n, claim in passed.items()}
    return [audited.get(n, verdict) for n, verdict in enumerate(screened)]


def judge_cheat(
    cheat: Cheat, requests: Sequence[GenerationRequest], published: Weights, models: ResidentModels, scratch: Path
) -> list[Verdict]:
    """Have a cheat write, and judge."""
    return judge(write_all(cheat, requests, published, scratch), requests, models)


def reasons(verdicts: Sequence[Verdict]) -> set[RejectionReason | None]:
    """Why they were rejected; None among them if one was not."""
    return {verdict.reason for verdict in verdicts}


def values(verdicts: Sequence[Verdict], metric: str) -> list[float]:
    """A check's number from each of the verdicts that have it."""
    return [verdict.metrics[metric] for verdict in verdicts if metric in verdict.metrics]


def separation(cheat: Sequence[float], honest: Sequence[float]) -> float:
    """By how many standard errors the cheat's mean is above the honest one's (Welch's statistic)."""
    variance = statistics.variance(cheat) / len(cheat) + statistics.variance(honest) / len(honest)
    return (statistics.fmean(cheat) - statistics.fmean(honest)) / math.sqrt(variance)
