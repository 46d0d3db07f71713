"""The run at a glance, read in one snapshot: what the status page, the JSON API and the metrics show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Row, Select, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.audit import classify
from coordinator.store import database, hardware, leases, tallies, versions, workers
from coordinator.store import tables as t
from coordinator.store.hardware import HardwareLine

_RECENT_STEPS = 200
_RECENT_EVENTS = 20
_LISTED_WORKERS = 50
_THROUGHPUT_WINDOW_S = 60.0
_ACCEPTED = ("accepted", "served", "trained")
_ALERTS = (
    "inconclusive",
    "alarm",
    "trainer_alarm",
    "watch",
    "bad_task",
    "shadow",
)  # events that an operator must see, however many others come


@dataclass(frozen=True, slots=True)
class EvidenceLine:
    """What a test over many rollouts holds against a worker: `log_e` 0 is nothing. `alarmed_at`: its latest alarm."""

    test: str
    log_e: float
    rollouts: int
    tokens: int
    alarmed_at: float | None


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """One worker as the page lists it."""

    worker_id: str
    name: str
    hardware: str
    credits: int
    strikes: int
    accepted: int
    rejected: int
    banned: bool
    ban_reason: str
    idle_s: float
    worker_class: str
    precision: str
    hardware_class: str
    evidence: list[EvidenceLine] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepLine:
    """One optimizer step as the trainer reported it."""

    batch: int
    trainer_version: int
    metrics: dict[str, float]
    dropped: dict[str, int]
    reported_at: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts are of the whole run; throughput is of the last minute. `credits`: of all workers. `workers`: those that have
    the most."""

    now: float
    head_version: int | None
    live_leases: int
    rollouts: dict[str, int]
    rejections: dict[str, int]
    drops: dict[str, int]
    verified_tokens_per_s: float
    accepted_per_minute: int
    max_staleness_seen: int
    multi_span_accepted: int
    workers_active: int
    workers_banned: int
    credits: int
    workers: list[WorkerLine] = field(default_factory=list)
    hardware: list[HardwareLine] = field(default_factory=list)
    precisions: dict[str, int] = field(default_factory=dict)  # rollouts received in each class
    steps: list[StepLine] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    alerts: list[dict[str, Any]] = field(default_factory=list)


async def read(connection: AsyncConnection, *, probation_rollouts: int = 0) -> Summary:
    """Read the run's summary."""
    now = await database.now(connection)
    head = await versions.head(connection)
    reasons = {reason: n for (reason,), n in sorted((await tallies.total(connection, tallies.DROPS)).items())}
    tokens, count = await _recent(connection, now - _THROUGHPUT_WINDOW_S)
    rollouts = await tallies.total(connection, tallies.ROLLOUTS)
    staleness = [int(steps) for (steps,) in await tallies.total(connection, tallies.STALENESS)]
    states, precisions = Counter[str](), Counter[str]()
    for (state, precision, _), n in rollouts.items():
        states[state] += n
        precisions[precision] += n
    standings = await _standings(connection)
    return Summary(
        now=now,
        head_version=None if head is None else head.version,
        live_leases=await leases.count_live(connection),
        rollouts=dict(sorted(states.items())),
        rejections={key: n for key, n in reasons.items() if key.startswith(("rejected:", "refused:"))},
        drops={key: n for key, n in reasons.items() if not key.startswith(("rejected:", "refused:"))},
        verified_tokens_per_s=tokens / _THROUGHPUT_WINDOW_S,
        accepted_per_minute=count,
        max_staleness_seen=max(staleness, default=0),
        multi_span_accepted=sum(
            n for (state, _, spans), n in rollouts.items() if state in _ACCEPTED and int(spans) > 1
        ),
        workers_active=standings[False][0],
        workers_banned=standings[True][0],
        credits=standings[False][1] + standings[True][1],
        workers=await _workers(connection, now, probation_rollouts),
        hardware=list(await hardware.lines(connection)),
        precisions=dict(sorted(precisions.items())),
        steps=await _steps(connection),
        events=_lines(await connection.execute(_newest_events(None))),
        alerts=await _alerts(connection),
    )


async def state(connection: AsyncConnection) -> tuple[Any, ...]:
    """Something that differs whenever the run has changed in a way that pages show; cheap to read."""
    newest = [func.max(t.events.c.event_id), func.max(t.verdicts.c.verified_at), func.max(t.rollouts.c.received_at)]
    newest += [func.max(t.policy_versions.c.version), func.max(t.steps.c.batch)]
    values = [(await connection.execute(select(each))).scalar() for each in newest]
    return (*values, await leases.count_live(connection))


async def _recent(connection: AsyncConnection, since: float) -> tuple[int, int]:
    row = (
        await connection.execute(
            select(func.coalesce(func.sum(t.rollouts.c.tokens), 0), func.count())
            .join(t.verdicts, t.verdicts.c.rollout_id == t.rollouts.c.rollout_id)
            .where(t.verdicts.c.verified_at >= since, t.verdicts.c.outcome == "accepted")
        )
    ).one()
    return int(row[0]), int(row[1])


async def _standings(connection: AsyncConnection) -> dict[bool, tuple[int, int]]:
    """Workers and their credits, of those that are banned or not."""
    found = {False: (0, 0), True: (0, 0)}
    sums = select(t.workers.c.banned, func.count(), func.sum(t.workers.c.credits)).group_by(t.workers.c.banned)
    for banned, count, credits in await connection.execute(sums):
        found[bool(banned)] = (int(count), int(credits))
    return found


async def _workers(connection: AsyncConnection, now: float, probation_rollouts: int) -> list[WorkerLine]:
    most = select(t.workers).order_by(t.workers.c.credits.desc(), t.workers.c.worker_id).limit(_LISTED_WORKERS)
    rows = list(await connection.execute(most))
    evidence = await _evidence(connection, [row.worker_id for row in rows])
    return [
        WorkerLine(
            worker_id=row.worker_id,
            name=row.name,
            hardware=row.hardware,
            credits=row.credits,
            strikes=row.strikes,
            accepted=row.accepted,
            rejected=row.rejected,
            banned=row.banned,
            ban_reason=row.ban_reason,
            idle_s=max(0.0, now - row.last_seen_at),
            worker_class=classify(
                workers.standing_of(row), watched=row.watched, probation_rollouts=probation_rollouts
            ).value,
            precision=row.precision,
            hardware_class=row.hardware_class,
            evidence=evidence.get(row.worker_id, []),
        )
        for row in rows
    ]


async def _evidence(connection: AsyncConnection, worker_ids: Sequence[str]) -> dict[str, list[EvidenceLine]]:
    """The most first."""
    found: dict[str, list[EvidenceLine]] = {}
    theirs = select(t.evidence).where(t.evidence.c.worker_id.in_(worker_ids))
    for row in await connection.execute(theirs.order_by(t.evidence.c.log_e.desc(), t.evidence.c.test)):
        line = EvidenceLine(row.test, row.log_e, row.rollouts, row.tokens, row.alarmed_at)
        found.setdefault(row.worker_id, []).append(line)
    return found


async def _steps(connection: AsyncConnection) -> list[StepLine]:
    rows = await connection.execute(select(t.steps).order_by(t.steps.c.batch.desc()).limit(_RECENT_STEPS))
    lines = [StepLine(row.batch, row.trainer_version, row.metrics, row.dropped, row.reported_at) for row in rows]
    return lines[::-1]


def _newest_events(action: str | None) -> Select[Any]:
    newest = select(t.events) if action is None else select(t.events).where(t.events.c.action == action)
    return newest.order_by(t.events.c.event_id.desc()).limit(_RECENT_EVENTS)


async def _alerts(connection: AsyncConnection) -> list[dict[str, Any]]:
    """Asked for by kind: who looks for all kinds at once reads all events if alerts are rare."""
    found = [row for action in _ALERTS for row in await connection.execute(_newest_events(action))]
    return _lines(sorted(found, key=lambda row: row.event_id, reverse=True)[:_RECENT_EVENTS])


def _lines(rows: Iterable[Row[Any]]) -> list[dict[str, Any]]:
    return [
        {"at": row.at, "actor": row.actor, "action": row.action, "subject": row.subject, "detail": row.detail}
        for row in rows
    ]
