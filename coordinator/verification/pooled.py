"""Which tests run over all of a worker's rollouts, and what honest workers' means are at most (`pooling` has the method)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.verification.fields import checked, tables
from protocol.errors import UserError

# Of one rollout, against our prefill: they depend on model and engine.
PROOF_MANTISSA = "proof_mantissa"  # mean mantissa error, by chunk
PROOF_EXPONENT = "proof_exponent"  # exponent mismatches, by chunk
LOGPROB_GAP = "logprob_gap"  # mean |claimed - ours|
SEED_MARGIN = "seed_margin"  # mean margin by which tokens lose the replay
# Of a group, by comparison with others.
NEAR_TIE = "near_tie"  # near ties fall to the second best more often where that pays
GIVEN_UP = "given_up"  # samples that were given up turn out to be the bad ones
REWARD_HIGH = "reward_high"  # rewards above those of others on the same tasks
REWARD_LOW = "reward_low"  # and below

NUMERIC = (PROOF_MANTISSA, PROOF_EXPONENT, LOGPROB_GAP, SEED_MARGIN)
COMPARED = (NEAR_TIE, GIVEN_UP, REWARD_HIGH, REWARD_LOW)

# Numbers that a verdict keeps for comparisons within its group.
NEAR_TIES, NEAR_TIES_LOST = "near_ties", "near_ties_lost"
NEAR_TIE_NATS = 0.05  # numerics alone may exchange two tokens whose noisy scores are nearer than that

ALERT, STRIKE = "alert", "strike"
_ACTIONS = (ALERT, STRIKE)
_SIGNED = frozenset({"floor", "mean", "cap"})


@dataclass(frozen=True, slots=True)
class PooledClass:
    """Bounds for numbers that are of `tokens_min` tokens or more: clipped to [floor, cap], their honest mean is at most
    `mean`."""

    tokens_min: int
    floor: float
    mean: float
    cap: float

    def __post_init__(self) -> None:
        if not self.floor < self.mean < self.cap:
            raise UserError(f"floor < mean < cap must hold, got {self.floor}, {self.mean}, {self.cap}")


@dataclass(frozen=True, slots=True)
class PooledTest:
    """One test. `action`: `strike` bans the worker, `alert` tells the operator. `alpha`: expected false alarms per
    worker-month, at most. Numbers of fewer tokens than the first of `classes` are not judged."""

    name: str
    action: str
    alpha: float
    classes: tuple[PooledClass, ...]

    def __post_init__(self) -> None:
        starts = [each.tokens_min for each in self.classes]
        if not starts or starts[0] < 1 or starts != sorted(set(starts)):
            raise UserError(f"classes: tokens_min must ascend from at least 1, got {starts}")
        if self.name not in NUMERIC + COMPARED:
            raise UserError(f"no test is named {self.name!r}; known are {', '.join(NUMERIC + COMPARED)}")
        if self.action not in _ACTIONS:
            raise UserError(f"action must be one of {', '.join(_ACTIONS)}, got {self.action!r}")
        if not 0.0 < self.alpha <= 1.0:
            raise UserError(f"alpha must be in (0, 1], got {self.alpha}")

    def for_tokens(self, tokens: int) -> PooledClass | None:
        """The class of numbers that are of that many tokens; None if so few were not measured."""
        return next((each for each in reversed(self.classes) if each.tokens_min <= tokens), None)


@dataclass(frozen=True, slots=True)
class Pooled:
    """All tests. `observations_per_month`: audited rollouts (or groups) that make a worker-month. `watch`: the share of
    the alarm level from which on a worker is audited in full. `near_tie_share`: of near ties, those that honest numerics
    give to the second best. `source`: the evidence, in words."""

    observations_per_month: float
    watch: float
    near_tie_share: float
    tests: tuple[PooledTest, ...]
    source: str

    def __post_init__(self) -> None:
        names = [test.name for test in self.tests]
        if len(set(names)) != len(names):
            raise UserError("tests: two have the same name")
        if self.observations_per_month < 1 or not 0.0 < self.watch <= 1.0:
            raise UserError("observations_per_month must be at least 1, and watch in (0, 1]")

    @classmethod
    def from_mapping(cls, fields: Any) -> Pooled:
        """From parsed TOML or JSON. Raises UserError that names the field."""
        values = checked(fields, cls, "pooled")
        where = "pooled: tests"
        values["tests"] = tuple(
            _parsed(_test, test, f"{where}[{index}]") for index, test in enumerate(tables(values["tests"], where))
        )
        return _said(lambda: cls(**values), "pooled")


def _test(fields: Mapping[str, Any], where: str) -> PooledTest:
    values = checked(fields, PooledTest, where)
    found: Iterable[Any] = enumerate(tables(values["classes"], f"{where}: classes"))
    values["classes"] = tuple(
        PooledClass(**checked(each, PooledClass, f"{where}: classes[{index}]", signed=_SIGNED)) for index, each in found
    )
    return PooledTest(**values)


def _parsed(parse: Any, fields: Mapping[str, Any], where: str) -> Any:
    return _said(lambda: parse(fields, where), where)


def _said(make: Any, where: str) -> Any:
    """What `make` returns; a UserError of the values' own is said with the place where they stand."""
    try:
        return make()
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith("pooled") else f"{where}: {text}") from None


def _one_class(mean: float) -> tuple[PooledClass, ...]:
    return (PooledClass(1, -1.0, mean, 1.0),)


_COMPARED_TESTS = (
    PooledTest(NEAR_TIE, ALERT, 0.01, _one_class(0.02)),
    PooledTest(GIVEN_UP, ALERT, 0.01, _one_class(0.02)),
    PooledTest(REWARD_HIGH, ALERT, 0.005, _one_class(0.02)),
    PooledTest(REWARD_LOW, ALERT, 0.005, _one_class(0.02)),
)

# What holds for any model: comparisons of workers with one another.
COMPARISONS = Pooled(
    observations_per_month=1e6,
    watch=0.5,
    near_tie_share=0.3,
    tests=_COMPARED_TESTS,
    source="comparisons within a group need no measurement: their honest mean is 0 by symmetry, 0.02 is admitted",
)
