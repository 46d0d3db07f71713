"""What the API answers. The OpenAPI description is made from these types, so that it can't say anything else.

Numbers that JSON can't hold (NaN, infinities) are null. Times are Unix seconds by the database's clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from coordinator.dashboard.tokens import ColouredToken
from coordinator.store.hardware import HardwareLine
from coordinator.store.summary import EvidenceLine, StepLine, Summary, WorkerLine
from protocol.rollout import AT_LEAST


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no answer, in words."""

    error: str


@dataclass(frozen=True, slots=True)
class Versions:
    """Policy versions that an origin must keep."""

    versions: list[int]


@dataclass(frozen=True, slots=True)
class EventLine:
    """One line of the audit log."""

    at: float
    actor: str
    action: str
    subject: str
    detail: str


@dataclass(frozen=True, slots=True)
class Status:
    """The run at a glance. Counts are of the whole run, throughput is of the last minute.

    `workers` (with the most credits; `/workers` lists all), `events` and `alerts` tell of single workers: null for whoever
    has no token.
    """

    now: float
    head_version: int | None
    live_leases: int
    workers_active: int
    workers_banned: int
    rollouts: dict[str, int]
    rejections: dict[str, int]
    drops: dict[str, int]
    verified_tokens_per_s: float
    accepted_per_minute: int
    max_staleness_seen: int
    multi_span_accepted: int
    hardware: list[HardwareLine]
    precisions: dict[str, int]
    steps: list[StepLine]
    workers: list[WorkerLine] | None
    events: list[EventLine] | None
    alerts: list[EventLine] | None


def status_of(summary: Summary, *, known: bool) -> Status:
    """`known`: the caller may be told of single workers."""
    return Status(
        now=summary.now,
        head_version=summary.head_version,
        live_leases=summary.live_leases,
        workers_active=summary.workers_active,
        workers_banned=summary.workers_banned,
        rollouts=summary.rollouts,
        rejections=summary.rejections,
        drops=summary.drops,
        verified_tokens_per_s=summary.verified_tokens_per_s,
        accepted_per_minute=summary.accepted_per_minute,
        max_staleness_seen=summary.max_staleness_seen,
        multi_span_accepted=summary.multi_span_accepted,
        hardware=summary.hardware,
        precisions=summary.precisions,
        steps=summary.steps,
        workers=summary.workers if known else None,
        events=[EventLine(**event) for event in summary.events] if known else None,
        alerts=[EventLine(**event) for event in summary.alerts] if known else None,
    )


@dataclass(frozen=True, slots=True)
class LeaderboardLine:
    """A worker in good standing. `credits`: verified tokens."""

    rank: int
    worker_id: str
    name: str
    credits: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Leaderboard:
    """`more`: there is another page."""

    lines: list[LeaderboardLine]
    more: bool


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker. `worker_class`: how closely it is audited. What it says of itself is text from a stranger."""

    worker_id: str
    name: str
    hardware: str
    hardware_class: str
    software: str
    precision: str
    credits: int
    strikes: int
    accepted: int
    rejected: int
    banned: bool
    ban_reason: str
    worker_class: str
    registered_at: float
    last_seen_at: float


@dataclass(frozen=True, slots=True)
class Workers:
    """`more`: there is another page."""

    workers: list[Worker]
    more: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """One number that a check holds to a bound: the largest admitted, or the least if `at_least`."""

    name: str
    value: float | None
    admitted: float | None
    at_least: bool
    holds: bool


@dataclass(frozen=True, slots=True)
class StandingLine:
    """A strike, ban or pardon, and what was measured where a rollout is behind it."""

    entry_id: int
    kind: str
    at: float
    rollout_id: str | None
    note: str
    detail: str
    measured: list[Measured]


@dataclass(frozen=True, slots=True)
class WorkerDetail:
    """What the run holds of a worker, and against it."""

    worker: Worker
    evidence: list[EvidenceLine]
    strikes: list[StandingLine]


@dataclass(frozen=True, slots=True)
class Envelope:
    """`payload`: the very text that was signed. `signature`: hex."""

    payload: str
    key_id: str
    signature: str


@dataclass(frozen=True, slots=True)
class SignedStatement:
    """A worker's statement of account, and the ledger's lines that it binds: kind, amount, rollout, note."""

    statement: Envelope
    entries: list[tuple[str, int, str | None, str]]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout. What its verdict says is null as long as there is none."""

    rollout_id: str
    worker_id: str
    sample_id: str
    environment: str
    task_index: int
    tokens: int
    oldest_version: int
    newest_version: int
    spans: int
    precision: str
    state: str
    drop_reason: str | None
    outcome: str | None
    reason: str | None
    reward: float | None
    audited: bool | None
    received_at: float


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Newest first. `before`: what to ask with for older ones, null if there are none."""

    rollouts: list[Rollout]
    before: float | None


@dataclass(frozen=True, slots=True)
class Token:
    """`gap`: how far the worker's log-probability is from ours, in nats; null where nothing was measured. `by_model`: false
    for what a tool answered."""

    text: str
    token_id: int
    version: int
    gap: float | None
    by_model: bool


@dataclass(frozen=True, slots=True)
class RolloutDetail:
    """`tokens` is empty where the payload is kept no longer."""

    rollout: Rollout
    prompt: str
    detail: str
    batch: int | None
    staleness: int | None
    tokens: list[Token]
    measured: list[Measured]


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """One entry: verified tokens of a credit, weight of a strike."""

    entry_id: int
    worker_id: str
    kind: str
    amount: int
    rollout_id: str | None
    note: str
    at: float


@dataclass(frozen=True, slots=True)
class Ledger:
    """Newest first. `sums`: amounts by kind, over the whole ledger. `before`: as in Rollouts."""

    entries: list[LedgerLine]
    sums: dict[str, int]
    before: int | None


@dataclass(frozen=True, slots=True)
class NumberedEvent:
    """One line of the audit log, and its number."""

    event_id: int
    at: float
    actor: str
    action: str
    subject: str
    detail: str


@dataclass(frozen=True, slots=True)
class Events:
    """Newest first. `before`: as in Rollouts."""

    events: list[NumberedEvent]
    before: int | None


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that may change while the run goes on. `changed`: it was, since the run file."""

    name: str
    value: float
    low: float
    high: float
    whole: bool
    meaning: str
    changed: bool


@dataclass(frozen=True, slots=True)
class RunNow:
    """What the run does now, and by which settings."""

    run_id: str
    name: str
    state: Literal["granting leases", "draining", "paused"]
    settings: list[Setting]


@dataclass(frozen=True, slots=True)
class Done:
    """What was done, in words."""

    done: str


def measured_of(metrics: Mapping[str, float] | None, admitted: Mapping[str, float] | None) -> list[Measured]:
    """Every number that has a bound, in order of names."""
    found = []
    for name, bound in sorted((admitted or {}).items()):
        value = (metrics or {}).get(name)
        if value is not None:
            least = name in AT_LEAST
            found.append(
                Measured(name, finite(value), finite(bound), least, value >= bound if least else value <= bound)
            )
    return found


def token_of(token: ColouredToken) -> Token:
    return Token(token.text, token.token_id, token.version, finite(token.gap), token.by_model)


def rollout_of(row: Any) -> Rollout:
    """From a row of `store.browse`."""
    names = Rollout.__dataclass_fields__
    return Rollout(**{name: getattr(row, name) for name in names} | {"reward": finite(row.reward)})


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
