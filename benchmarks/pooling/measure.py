"""Claims through the verifier's own prefill and checks: what the tests over many rollouts would take from each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.pooling.engine import DIGEST, Request
from coordinator.tokenizer import RunTokenizer
from coordinator.verification.checks import Claim, run_checks
from coordinator.verification.checks.run import prefill_checks
from coordinator.verification.pooling import Statistic
from coordinator.verification.resident import PrefillRequest, ResidentModels, prefill_rollouts
from coordinator.verification.thresholds import DEFAULTS
from environments.arithmetic import Arithmetic
from protocol.rollout import Outcome, SamplingParams

_OPEN_ENDED = (
    "Once upon a time, in a village by the sea,",
    "The main causes of the French Revolution were",
    "To bake a good loaf of bread, first",
    "Question: A train leaves at noon and travels at 60 km/h. How far is it after three hours? Think step by step.\nAnswer:",
    "def fibonacci(n):\n    ",
    "Dear Sir or Madam, I am writing to you because",
)
_SHORT_TOKENS = (2, 3, 4, 6, 8, 8, 12, 20)


@dataclass(frozen=True, slots=True)
class Measured:
    """One rollout: its tokens, whether each single-rollout check passes, and its statistics."""

    tokens: int
    accepted: bool
    statistics: tuple[Statistic, ...]
    near_ties: int
    near_ties_lost: int


class Verifier:
    """The prefill that a coordinator would run: bf16, the published weights."""

    def __init__(self, folder: Path) -> None:
        self._models = ResidentModels(lambda _digest: folder, max_resident=1, dtype=torch.bfloat16)

    def measure(self, claims: Sequence[Claim]) -> list[Measured]:
        """What it finds in each claim."""
        found = prefill_rollouts([_to_prefill(claim) for claim in claims], self._models)
        return [_measured(claim, found[claim.rollout.sample_id]) for claim in claims]


def make_requests(folder: Path, *, count: int, long_tokens: int, eos: tuple[int, ...], seed: int) -> list[Request]:
    """Half short answers to sums, of all lengths up to 20, half open-ended texts; every one with a seed of its own."""
    tokenizer = RunTokenizer(folder)
    random = np.random.default_rng(seed)
    sums = Arithmetic()
    requests = []
    for number in range(count):
        short = number % 2 == 0
        text = sums.task(number // 8).prompt if short else _OPEN_ENDED[number // 2 % len(_OPEN_ENDED)]
        longest = _SHORT_TOKENS[number // 2 % len(_SHORT_TOKENS)] if short else long_tokens
        sampling = SamplingParams(1.0, longest, eos)
        issued = int(random.integers(0, 2**63 - 1))
        requests.append(Request(f"{seed}-{number}", tuple(tokenizer.encode(text)), issued, sampling))
    return requests


def _to_prefill(claim: Claim) -> PrefillRequest:
    rollout = claim.rollout
    assert rollout.spans[0].manifest_digest == DIGEST
    return PrefillRequest(
        rollout.sample_id,
        claim.prompt_token_ids,
        rollout.token_ids,
        claim.seed,
        claim.sampling.temperature,
        rollout.spans,
    )


def _measured(claim: Claim, prefill: object) -> Measured:
    checks = prefill_checks(DEFAULTS)
    results = [check(claim, prefill) for check in checks]  # type: ignore[arg-type]
    verdict = run_checks(claim, prefill, DEFAULTS)  # type: ignore[arg-type]
    metrics = results[-1].metrics
    return Measured(
        tokens=len(claim.rollout.token_ids),
        accepted=verdict.outcome is Outcome.ACCEPTED,
        statistics=tuple(each for result in results for each in result.statistics),
        near_ties=int(metrics["near_ties"]),
        near_ties_lost=int(metrics["near_ties_lost"]),
    )
