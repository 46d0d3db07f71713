"""Executes what a verdict that accepts nothing does: the next state, a strike, and the purge that follows a ban.

Everything about one rollout happens in one transaction, so that a verifier killed at any point leaves either no trace
(its claim runs out and another verifier takes the rollout) or the whole verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Row, select
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.evidence import Alarm
from coordinator.hardware import is_alert
from coordinator.store import events, groups, hardware, leases, many, rollouts, workers
from coordinator.store import tables as t
from coordinator.store.database import among
from coordinator.verification.pooled import STRIKE, Pooled
from protocol.lease import LeaseState, finish
from protocol.ledger import STATISTICAL, Entry, EntryKind, entries_for_rejection, is_gross
from protocol.rollout import Outcome, RejectionReason, Verdict
from protocol.wire import floats_to_bytes

ALERT_AT_ATTEMPTS = 2
GIVE_UP_AT_ATTEMPTS = 5
RETRY_AFTER_S = 1.0  # then four times as long each time: an outage of a minute loses nothing


@dataclass(frozen=True, slots=True)
class Rules:
    """What verdicts go by. `pooled`: for each precision class, the tests over many rollouts; the first's compare groups."""

    max_strikes: int
    probation_rollouts: int
    pooled: Mapping[str, Pooled]

    def pooled_of(self, precision: str) -> Pooled:
        """The tests of a class; the first's for one that the run no longer admits."""
        return self.pooled.get(precision) or next(iter(self.pooled.values()))


async def lost(connection: AsyncConnection, at: float) -> list[Row]:
    """What no verifier survives: rollouts whose last claim ran out without a verdict."""
    return await rollouts.abandoned(connection, at=at, attempts=GIVE_UP_AT_ATTEMPTS)


async def give_up(connection: AsyncConnection, at: float) -> int:
    """Drop what is lost; how many there were."""
    found = await lost(connection, at)
    for row in found:
        detail = f"{row.attempts} claims ran out without a verdict"
        await events.record(
            connection, at=at, actor="verifier", action="inconclusive", subject=row.rollout_id, detail=detail
        )
        await rollouts.drop(connection, row, "inconclusive", at, again=True)
    return len(found)


async def turn_down(
    connection: AsyncConnection, rollout_id: str, verdict: Verdict, *, verifier: str, at: float, rules: Rules
) -> None:
    """Write a verdict that accepts nothing; nothing is written if this verifier no longer holds the claim."""
    assert verdict.outcome is not Outcome.ACCEPTED, "coordinator.acceptance executes those"
    row = await rollouts.get(connection, rollout_id)
    if row is None or row.state != "verifying" or row.verifier != verifier:
        return
    if verdict.outcome is Outcome.INCONCLUSIVE:
        await _postpone(connection, row, verdict, at)
        return
    await insert(connection, {rollout_id: verdict}, verifier, at)
    await _reject(connection, row, verdict, at, rules.max_strikes)


async def insert(connection: AsyncConnection, found: Mapping[str, Verdict], verifier: str, at: float) -> None:
    """Store verdicts by rollout, and nothing else of what they do."""
    await many.insert(
        connection,
        t.verdicts,
        [
            {
                "rollout_id": rollout_id,
                "outcome": verdict.outcome.value,
                "reason": verdict.reason.value if verdict.reason else None,
                "detail": verdict.detail,
                "reward": verdict.reward,
                "audited": verdict.audited,
                "old_logprobs": floats_to_bytes(verdict.old_logprobs),
                "entropies": floats_to_bytes(verdict.entropies),
                "metrics": events.finite(verdict.metrics),
                "admitted": events.finite(verdict.admitted),
                "observations": events.finite(verdict.observations),
                "verifier": verifier,
                "verified_at": at,
            }
            for rollout_id, verdict in found.items()
        ],
    )


async def _postpone(connection: AsyncConnection, row: Row, verdict: Verdict, at: float) -> None:
    """Our fault: tried again. Two in a row raise an alert; after five the work is dropped, credited to nobody's blame."""
    attempts: int = row.attempts
    rollout_id: str = row.rollout_id
    if attempts >= ALERT_AT_ATTEMPTS:
        await events.record(
            connection,
            at=at,
            actor="verifier",
            action="inconclusive",
            subject=rollout_id,
            detail=f"attempt {attempts}: {verdict.detail}",
        )
    if attempts >= GIVE_UP_AT_ATTEMPTS:
        await rollouts.drop(connection, row, "inconclusive", at, again=True)
        return
    await rollouts.postpone(connection, rollout_id, until=at + RETRY_AFTER_S * 4 ** (attempts - 1))


async def act_on(connection: AsyncConnection, alarms: Sequence[Alarm], at: float, max_strikes: int) -> None:
    """Tell the operator; ban where the test says so."""
    for alarm in alarms:
        await events.record(
            connection, at=at, actor="verifier", action="alarm", subject=alarm.worker_id, detail=alarm.detail
        )
        standing = await workers.standing(connection, alarm.worker_id)
        if alarm.action != STRIKE or standing is None or standing.banned:
            continue
        entries = entries_for_rejection(
            alarm.worker_id, None, RejectionReason.POOLED, alarm.detail, standing, max_strikes
        )
        await _strike(connection, alarm.worker_id, entries, at, actor="verifier")


async def _strike(
    connection: AsyncConnection, worker_id: str, entries: Sequence[Entry], at: float, *, actor: str
) -> None:
    """Add what a rejection costs, if anything; a ban purges."""
    await workers.add_entries(connection, entries, at)
    for entry in entries:
        if entry.kind is EntryKind.STRIKE:
            await events.record(connection, at=at, actor=actor, action="strike", subject=worker_id, detail=entry.note)
        elif entry.kind is EntryKind.BAN:
            await purge(connection, worker_id, at=at, actor=actor, why=entry.note)


async def _reject(connection: AsyncConnection, row: Row, verdict: Verdict, at: float, max_strikes: int) -> None:
    worker_id: str = row.worker_id
    rollout_id: str = row.rollout_id
    assert verdict.reason is not None, "a rejection names its reason"
    await rollouts.set_state(connection, [rollout_id], "rejected")
    await groups.free_samples(connection, [row.sample_id])
    await events.count_drop(
        connection, at=at, reason=f"rejected:{verdict.reason}", tokens=row.tokens, rollout_id=rollout_id
    )
    await workers.count_rejection(connection, worker_id)
    in_shadow = (await hardware.shadow_classes(connection, [row.lease_id])).get(row.lease_id)
    gross = is_gross(verdict, row.tokens)
    if in_shadow is not None and verdict.reason in STATISTICAL and not gross:
        await _note_in_shadow(connection, row, verdict, in_shadow, at)
        return
    standing = await workers.standing(connection, worker_id)
    assert standing is not None
    entries = entries_for_rejection(
        worker_id, rollout_id, verdict.reason, verdict.detail, standing, max_strikes, gross=gross
    )
    await _strike(connection, worker_id, entries, at, actor="verifier")


async def _note_in_shadow(connection: AsyncConnection, row: Row, verdict: Verdict, name: str, at: float) -> None:
    """A rejection that the hardware may be to blame for: recorded, not punished; the operator hears of it."""
    count = await hardware.count_verdict(connection, name, accepted=False)
    detail = f"{verdict.reason}, on {name}: {verdict.detail}"
    await events.record(
        connection, at=at, actor="verifier", action="shadow_reject", subject=row.worker_id, detail=detail
    )
    if is_alert(count):
        detail = f"{count} rejected so far, the latest for {verdict.reason}: {verdict.detail}"
        await events.record(connection, at=at, actor="verifier", action="shadow", subject=name, detail=detail)


async def strikable(connection: AsyncConnection, refused: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those of these refused submissions, (worker, rollout), that `refuse` may strike for: neither replays of what was struck
    for already, nor of a worker that is banned or unknown. So nobody makes others wait for strikes without end."""
    theirs = among(connection, t.ledger.c.rollout_id, sorted({rollout_id for _, rollout_id in refused}))
    struck = set((await connection.execute(select(t.ledger.c.rollout_id).where(theirs))).scalars())
    known = await workers.known(connection, sorted({worker_id for worker_id, _ in refused}))
    free = {worker_id for worker_id, each in known.items() if not each.standing.banned}
    return {(worker, rollout) for worker, rollout in refused if worker in free and rollout not in struck}


async def refuse(
    connection: AsyncConnection,
    *,
    worker_id: str,
    rollout_id: str,
    reason: str,
    detail: str,
    at: float,
    max_strikes: int,
) -> bool:
    """Count a submission that was refused at the door, with the strike it deserves; whether it was struck for it."""
    standing = await workers.standing(connection, worker_id)
    if standing is None or standing.banned:
        return False
    already = select(t.ledger.c.entry_id).where(t.ledger.c.rollout_id == rollout_id).limit(1)
    if (await connection.execute(already)).first() is not None:
        return False  # a replay of the same bytes is one offence, not many
    entries = entries_for_rejection(worker_id, rollout_id, RejectionReason(reason), detail, standing, max_strikes)
    if not entries:
        await events.count_refusal(connection, at=at, reason=f"refused:{reason}")
        return False
    await events.count_drop(connection, at=at, reason=f"refused:{reason}", tokens=0, rollout_id=rollout_id)
    await workers.count_rejection(connection, worker_id)
    await _strike(connection, worker_id, entries, at, actor="coordinator")
    return True


async def purge(connection: AsyncConnection, worker_id: str, *, at: float, actor: str, why: str) -> Mapping[str, int]:
    """What a ban does: live leases are revoked, unconsumed rollouts dropped, their samples leased again."""
    revoked = await leases.live_of_worker(connection, worker_id)
    await leases.save_many(connection, [finish(lease, LeaseState.REVOKED) for lease in revoked])
    untrained = await rollouts.unconsumed_of_worker(connection, worker_id)
    for row in untrained:
        await rollouts.drop(connection, row, "banned", at, again=True)
        group = await groups.get(connection, row.group_id)
        if group is not None and group.state == "ready":
            await groups.set_state(connection, row.group_id, "open")
    await events.record(
        connection,
        at=at,
        actor=actor,
        action="ban",
        subject=worker_id,
        detail=f"{why}; {len(revoked)} leases revoked, {len(untrained)} rollouts purged",
    )
    return {"leases": len(revoked), "rollouts": len(untrained)}
