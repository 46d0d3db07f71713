"""How many workers and verifiers does a run need? Rate balance of generation, verification and training. Pure.

One step of B rollouts needs B·L tokens generated and (of the audited) prefilled, L being the mean length. W workers of r
tokens/s take G = B·L / (W·r) seconds, V verifiers of p tokens/s P = a·B·L / (V·p), the trainer S. The three run side by side,
so a step takes T = max(S, G, P), and whichever that is has no idle time.

Staleness: a version arrives D seconds after it is published, so work begins under it until T + D at the latest; R seconds
later the rollout is generated and verified, and the next step takes it. So from max_staleness = ⌈(T + D + R) / T⌉ on nothing
is dropped.
With 0 the parts wait for one another: D + G + P + S.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from protocol.errors import UserError


@dataclass(frozen=True, slots=True)
class Load:
    """What the run asks for. Lengths in tokens, times in seconds, rates in tokens per second of one worker or verifier.

    `in_flight`: samples that a worker generates at once, so that one takes in_flight · length / worker_rate seconds.
    `longest`: the longest completion that shall not be dropped; the mean if 0.
    """

    batch: int
    step_s: float
    worker_rate: float
    mean_length: float
    verifier_rate: float
    dissemination_s: float = 0.0
    in_flight: int = 32
    longest: float = 0.0
    audit_fraction: float = 1.0

    def __post_init__(self) -> None:
        positive = (self.batch, self.step_s, self.worker_rate, self.mean_length, self.verifier_rate, self.in_flight)
        if not all(math.isfinite(value) and value > 0 for value in positive):
            raise UserError("batch, step time, rates, mean length and samples in flight must be above 0")
        if not (math.isfinite(self.dissemination_s) and self.dissemination_s >= 0 and self.longest >= 0):
            raise UserError("dissemination time and longest completion must not be negative")
        if not 0 < self.audit_fraction <= 1:
            raise UserError("the audited fraction must be above 0 and at most 1")

    @property
    def tokens(self) -> float:
        """Of one batch."""
        return self.batch * self.mean_length


@dataclass(frozen=True, slots=True)
class Plan:
    """What comes out. Utilisations are in [0, 1]; `bottleneck`: training, generation or verification."""

    workers: int
    verifiers: int
    balanced_workers: int
    balanced_verifiers: int
    step_s: float
    bottleneck: str
    trainer_busy: float
    workers_busy: float
    verifiers_busy: float
    least_max_staleness: int
    on_policy_step_s: float


def plan(load: Load, *, workers: int | None = None, verifiers: int | None = None) -> Plan:
    """The balance with so many workers and verifiers; as many as keep the trainer busy where none are given."""
    balanced_workers = _needed(load.tokens / load.step_s, load.worker_rate)
    balanced_verifiers = _needed(load.audit_fraction * load.tokens / load.step_s, load.verifier_rate)
    workers, verifiers = workers or balanced_workers, verifiers or balanced_verifiers
    times = {
        "training": load.step_s,
        "generation": load.tokens / (workers * load.worker_rate),
        "verification": load.audit_fraction * load.tokens / (verifiers * load.verifier_rate),
    }
    bottleneck = max(times, key=lambda name: times[name])  # of equals the first: then training is
    step = times[bottleneck]
    longest = load.longest or load.mean_length
    rollout = load.in_flight * longest / load.worker_rate + longest / load.verifier_rate
    return Plan(
        workers=workers,
        verifiers=verifiers,
        balanced_workers=balanced_workers,
        balanced_verifiers=balanced_verifiers,
        step_s=step,
        bottleneck=bottleneck,
        trainer_busy=times["training"] / step,
        workers_busy=times["generation"] / step,
        verifiers_busy=times["verification"] / step,
        least_max_staleness=math.ceil((step + load.dissemination_s + rollout) / step - 1e-9),
        on_policy_step_s=load.dissemination_s + sum(times.values()),
    )


def _needed(demand: float, rate: float) -> int:
    """How many of that rate meet the demand; one that is met exactly needs none more for rounding's sake."""
    return max(1, math.ceil(demand / rate - 1e-9))


def lines(load: Load, found: Plan) -> list[str]:
    """The plan, for a person."""
    return [
        f"{load.batch} rollouts of {load.mean_length:g} tokens a step: {load.tokens:,.0f} tokens",
        f"balance     {found.balanced_workers} workers and {found.balanced_verifiers} verifiers keep the trainer busy",
        f"with        {found.workers} workers, {found.verifiers} verifiers: a step takes {found.step_s:.1f} s, bound by "
        f"{found.bottleneck}",
        f"busy        trainer {found.trainer_busy:.0%}, workers {found.workers_busy:.0%}, verifiers {found.verifiers_busy:.0%}",
        f"staleness   max_staleness {found.least_max_staleness} drops nothing; 0 makes a step {found.on_policy_step_s:.1f} s",
    ]
