"""Executes a verdict: the rollout's and sample's next state, credit or strike, and the purge that follows a ban.

Everything about one rollout happens in one transaction, so that a verifier killed at any point leaves either no trace
(its claim runs out and another verifier takes the rollout) or the whole verdict.
"""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Row, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store import events, groups, leases, rollouts, workers
from coordinator.store import tables as t
from protocol.lease import LeaseState, finish
from protocol.ledger import Entry, EntryKind, entries_for_rejection
from protocol.rollout import Outcome, RejectionReason, Verdict
from protocol.wire import floats_to_bytes

ALERT_AT_ATTEMPTS = 2
GIVE_UP_AT_ATTEMPTS = 5
RETRY_AFTER_S = 1.0  # then four times as long each time: an outage of a minute loses nothing


async def give_up(connection: AsyncConnection, at: float) -> int:
    """Drop what no verifier survives: rollouts whose last claim ran out without a verdict. How many there were."""
    lost = await rollouts.abandoned(connection, at=at, attempts=GIVE_UP_AT_ATTEMPTS)
    for row in lost:
        detail = f"{row.attempts} claims ran out without a verdict"
        await events.record(
            connection, at=at, actor="verifier", action="inconclusive", subject=row.rollout_id, detail=detail
        )
        await rollouts.drop(connection, row, "inconclusive", at, sample_state="waiting")
    return len(lost)


async def record(
    connection: AsyncConnection, rollout_id: str, verdict: Verdict, *, verifier: str, at: float, max_strikes: int
) -> bool:
    """Write a verdict. False, and nothing is written, if this verifier no longer holds the claim."""
    row = await rollouts.get(connection, rollout_id)
    if row is None or row.state != "verifying" or row.verifier != verifier:
        return False
    if verdict.outcome is Outcome.INCONCLUSIVE:
        await _postpone(connection, row, verdict, at)
        return True
    await _insert(connection, rollout_id, verdict, verifier, at)
    if verdict.outcome is Outcome.ACCEPTED:
        await _accept(connection, row, at)
    else:
        await _reject(connection, row, verdict, at, max_strikes)
    return True


async def _insert(connection: AsyncConnection, rollout_id: str, verdict: Verdict, verifier: str, at: float) -> None:
    await connection.execute(
        t.verdicts.insert().values(
            rollout_id=rollout_id,
            outcome=verdict.outcome.value,
            reason=verdict.reason.value if verdict.reason else None,
            detail=verdict.detail,
            reward=verdict.reward,
            audited=verdict.audited,
            old_logprobs=floats_to_bytes(verdict.old_logprobs),
            entropies=floats_to_bytes(verdict.entropies),
            metrics=events.finite(verdict.metrics),
            verifier=verifier,
            verified_at=at,
        )
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
        await rollouts.drop(connection, row, "inconclusive", at, sample_state="waiting")
        return
    await rollouts.postpone(connection, rollout_id, until=at + RETRY_AFTER_S * 4 ** (attempts - 1))


async def _accept(connection: AsyncConnection, row: Row, at: float) -> None:
    standing = await workers.standing(connection, row.worker_id)
    if standing is None or standing.banned:
        await rollouts.drop(connection, row, "banned", at, sample_state="waiting")
        return
    credit = Entry(row.worker_id, EntryKind.CREDIT, row.tokens, row.rollout_id)
    await workers.add_entries(connection, [credit], at)
    group = await groups.get(connection, row.group_id)
    assert group is not None
    if group.state != "open":
        # Its group went out incomplete, or was dropped: the work is credited, but comes too late to be trained on.
        await rollouts.drop(connection, row, "late", at, sample_state="dropped")
        return
    await rollouts.set_state(connection, [row.rollout_id], "accepted")
    await groups.set_sample(connection, row.sample_id, "accepted")
    missing = select(func.count()).where(t.samples.c.group_id == group.group_id, t.samples.c.state != "accepted")
    if (await connection.execute(missing)).scalar_one() == 0:
        await groups.set_state(connection, group.group_id, "ready")


async def _reject(connection: AsyncConnection, row: Row, verdict: Verdict, at: float, max_strikes: int) -> None:
    worker_id: str = row.worker_id
    rollout_id: str = row.rollout_id
    assert verdict.reason is not None, "a rejection names its reason"
    await rollouts.set_state(connection, [rollout_id], "rejected")
    await groups.set_sample(connection, row.sample_id, "waiting")
    await events.count_drop(
        connection, at=at, reason=f"rejected:{verdict.reason}", tokens=row.tokens, rollout_id=rollout_id
    )
    await workers.count_rejection(connection, worker_id)
    standing = await workers.standing(connection, worker_id)
    assert standing is not None
    entries = entries_for_rejection(worker_id, rollout_id, verdict.reason, verdict.detail, standing, max_strikes)
    await workers.add_entries(connection, entries, at)
    if any(entry.kind is EntryKind.BAN for entry in entries):
        await purge(connection, worker_id, at=at, actor="verifier", why=entries[-1].note)


async def refuse(
    connection: AsyncConnection,
    *,
    worker_id: str,
    rollout_id: str,
    reason: str,
    detail: str,
    at: float,
    max_strikes: int,
) -> None:
    """Count a submission that was refused at the door, with the strike it deserves, if any."""
    standing = await workers.standing(connection, worker_id)
    if standing is None or standing.banned:
        return
    already = select(t.ledger.c.entry_id).where(t.ledger.c.rollout_id == rollout_id).limit(1)
    if (await connection.execute(already)).first() is not None:
        return  # a replay of the same bytes is one offence, not many
    entries = entries_for_rejection(worker_id, rollout_id, RejectionReason(reason), detail, standing, max_strikes)
    if not entries:
        await events.count_refusal(connection, at=at, reason=f"refused:{reason}")
        return
    await events.count_drop(connection, at=at, reason=f"refused:{reason}", tokens=0, rollout_id=rollout_id)
    await workers.add_entries(connection, entries, at)
    await workers.count_rejection(connection, worker_id)
    if any(entry.kind is EntryKind.BAN for entry in entries):
        await purge(connection, worker_id, at=at, actor="coordinator", why=entries[-1].note)


async def purge(connection: AsyncConnection, worker_id: str, *, at: float, actor: str, why: str) -> Mapping[str, int]:
    """What a ban does: live leases are revoked, unconsumed rollouts dropped, their samples leased again."""
    revoked = await leases.live_of_worker(connection, worker_id)
    for lease in revoked:
        await leases.release(connection, finish(lease, LeaseState.REVOKED))
    untrained = await rollouts.unconsumed_of_worker(connection, worker_id)
    for row in untrained:
        await rollouts.drop(connection, row, "banned", at, sample_state="waiting")
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
