"""What a check sees and says."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from coordinator.verification.pooling import Statistic
from protocol.rollout import RejectionReason, Rollout, SamplingParams
from protocol.turns import Turns

if TYPE_CHECKING:
    from coordinator.verification.prefill import PrefillResult


@dataclass(frozen=True, slots=True)
class Claim:
    """A rollout beside what our side knows about it: nothing here but `rollout` comes from the worker.

    `turns`: how the task's turns are taken, None if it has one.
    """

    rollout: Rollout
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    vocab_size: int
    hidden_size: int
    turns: Turns | None = None


@dataclass(frozen=True, slots=True)
class CheckResult:
    """`detail` says what was expected and what came, so that a contributor can act on it; empty if passed.

    `admitted`: for each of the metrics that is held to a bound, that bound. `statistics`: what tests over many rollouts
    take from this one.
    """

    passed: bool
    detail: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    admitted: dict[str, float] = field(default_factory=dict)
    statistics: tuple[Statistic, ...] = ()

    @classmethod
    def failed(cls, detail: str) -> CheckResult:
        """A failure that has no numbers."""
        return cls(False, detail)

    def failing(self, detail: str) -> CheckResult:
        """The same numbers, and a failure."""
        return replace(self, passed=False, detail=detail)


class ModelFreeCheck(Protocol):
    """Needs only the claim; runs before anything is computed from it. Never raises for what a worker may send."""

    @property
    def reason(self) -> RejectionReason: ...

    def __call__(self, claim: Claim) -> CheckResult: ...


class Check(Protocol):
    """Compares a claim that passed all model-free checks with our prefill of it."""

    @property
    def reason(self) -> RejectionReason: ...

    def __call__(self, claim: Claim, prefill: PrefillResult) -> CheckResult: ...
