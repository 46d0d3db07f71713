"""Runs mutations down the line and counts what becomes of them. The same seed gives the same mutations, one by one."""

from __future__ import annotations

import random
import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from protocol.rollout import Outcome, Rollout, Verdict
from tests.adversary.fuzz.corpus import Corpus, Sample
from tests.adversary.fuzz.line import Line
from tests.adversary.fuzz.mutations import mutated

_BATCH = 256
_KEPT = 10  # of each kind of trouble: enough to mend it by


@dataclass(slots=True)
class Report:
    """`outcomes` counts each; `crashes` and `frauds` name the mutations, by number, that must not be.

    Accepted are: "same" (other bytes of the honest rollout), "log-probs" and "proofs" (other ones within what rounding
    explains: harmless), and "near tie" (another last token that loses the draw by no more than rounding may).
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    crashes: list[str] = field(default_factory=list)
    frauds: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        return [f"{count:8d}  {outcome}" for outcome, count in sorted(self.outcomes.items())]


class Fuzz:
    """One corpus, one line, one seed."""

    def __init__(self, corpus: Corpus, seed: int = 0) -> None:
        self._corpus = corpus
        self._line = Line(corpus)
        self._seed = seed
        self._report = Report()
        self._waiting: list[tuple[int, Rollout]] = []

    def run(self, start: int, stop: int) -> Report:
        """Mutations `start` to `stop`; the report goes on from earlier calls."""
        for number in range(start, stop):
            self._one(number)
            if len(self._waiting) >= _BATCH:
                self._verify()
        self._verify()
        return self._report

    def _one(self, number: int) -> None:
        draw = random.Random(f"{self._seed}/{number}")
        sample: Sample = draw.choice(self._corpus.samples)
        _, data = mutated(draw, self._corpus, sample)
        try:
            received = self._line.receive(data)
        except Exception:
            self._crashed(number)
            return
        if isinstance(received, str):
            self._report.outcomes[f"refused: {received}"] += 1
        else:
            self._waiting.append((number, received))

    def _verify(self) -> None:
        """All at once; if that crashes, one by one, to find out which it was."""
        waiting, self._waiting = self._waiting, []
        try:
            verdicts = self._line.verify([rollout for _, rollout in waiting])
        except Exception:
            if len(waiting) == 1:
                self._crashed(waiting[0][0])
                return
            for one in waiting:
                self._waiting = [one]
                self._verify()
            return
        for (number, rollout), verdict in zip(waiting, verdicts, strict=True):
            self._count(number, rollout, verdict)

    def _count(self, number: int, rollout: Rollout, verdict: Verdict) -> None:
        if verdict.outcome is Outcome.REJECTED:
            self._report.outcomes[f"rejected: {verdict.reason}"] += 1
            return
        difference = accepted_as(rollout, self._line.honest(rollout), verdict)
        self._report.outcomes[f"accepted: {difference}"] += 1
        if difference == "FRAUD" and len(self._report.frauds) < _KEPT:
            self._report.frauds.append(f"{self._seed}/{number}: {verdict.metrics}")

    def _crashed(self, number: int) -> None:
        self._report.outcomes["CRASH"] += 1
        if len(self._report.crashes) < _KEPT:
            self._report.crashes.append(f"{self._seed}/{number}: {traceback.format_exc(limit=-3)}")


def accepted_as(rollout: Rollout, honest: Rollout, verdict: Verdict) -> str:
    """In what an accepted rollout differs from the honest one; FRAUD for anything that it must not differ in."""
    if rollout == honest:
        return "same"
    if rollout == replace(honest, logprobs=rollout.logprobs, proofs=rollout.proofs):
        return "other log-probs" if rollout.proofs == honest.proofs else "other proofs"
    steered = replace(honest, segments=rollout.segments, logprobs=rollout.logprobs, proofs=rollout.proofs)
    only_last = rollout.token_ids[:-1] == honest.token_ids[:-1] and rollout.loss_mask == honest.loss_mask
    if rollout == steered and only_last and verdict.metrics["seed_margin_max"] > 0:
        return "near tie of the last token"
    return "FRAUD"


def resident_bytes() -> int:
    """How much memory this process holds."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status names no VmRSS")
