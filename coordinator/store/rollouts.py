"""Rollouts: received, claimed by verifiers, judged, dropped."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import zstandard
from sqlalchemy import Row, bindparam, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store import events, groups, many
from coordinator.store import tables as t
from coordinator.store.groups import unpack_tokens
from protocol.rollout import Rollout
from protocol.signing import SignedEnvelope
from protocol.wire import rollout_from_store

UNCONSUMED = ("pending", "verifying", "accepted")
_COMPRESSION_LEVEL = 3
_PAYLOAD_BYTES_MAX = 64 << 20
_OUT_OF_ORDER = 256  # rollouts of one worker that were judged before older ones


@dataclass(frozen=True, slots=True)
class PendingRollout:
    """A rollout to verify, with what our own side knows about its task. `newcomer`: its worker is on probation, or its
    hardware in shadow."""

    rollout_id: str
    worker_id: str
    rollout: Rollout
    group_id: str
    environment: str
    task_index: int
    prompt: str
    prompt_token_ids: tuple[int, ...]
    reference: Any
    max_tokens: int
    seed: int
    attempts: int
    newcomer: bool
    clean_tokens: int = 0
    watched: bool = False


@dataclass(frozen=True, slots=True)
class NewRollout:
    """A submission as it came, to be stored."""

    rollout_id: str
    rollout: Rollout
    group_id: str
    worker_id: str
    envelope: SignedEnvelope


async def insert(connection: AsyncConnection, new: Sequence[NewRollout], at: float) -> None:
    """Store submissions as they came. Raises IntegrityError if a sample or lease was answered already."""
    if not new:
        return
    await many.insert(connection, t.rollouts, [_values(each, at) for each in new])
    compressor = zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL)
    await many.insert(
        connection,
        t.payloads,
        [
            {
                "rollout_id": each.rollout_id,
                "payload": compressor.compress(each.envelope.payload),
                "key_id": each.envelope.key_id,
                "signature": each.envelope.signature,
            }
            for each in new
        ],
    )


def _values(new: NewRollout, at: float) -> dict[str, Any]:
    rollout = new.rollout
    return {
        "rollout_id": new.rollout_id,
        "sample_id": rollout.sample_id,
        "group_id": new.group_id,
        "lease_id": rollout.lease_id,
        "worker_id": new.worker_id,
        "received_at": at,
        "tokens": rollout.model_tokens,
        "oldest_version": rollout.oldest_version,
        "newest_version": rollout.newest_version,
        "spans": len(rollout.spans),
        "state": "pending",
        "attempts": 0,
        "precision": rollout.precision,
    }


async def received(connection: AsyncConnection, rollout_ids: Iterable[str]) -> dict[str, tuple[str, float]]:
    """(worker, when) of those of these that were received."""
    rows = await _RECEIVED.execute(connection, list(rollout_ids))
    return {row.rollout_id: (row.worker_id, row.received_at) for row in rows}


_RECEIVED = many.About(
    lambda mine: select(t.rollouts.c.rollout_id, t.rollouts.c.worker_id, t.rollouts.c.received_at).where(mine),
    t.rollouts.c.rollout_id,
)


async def keep_offence(
    connection: AsyncConnection,
    rollout_id: str,
    lease_id: str,
    worker_id: str,
    detail: str,
    envelope: SignedEnvelope,
    at: float,
) -> None:
    """Keep a refused submission that is proof against its key. Few are: each costs a strike."""
    await connection.execute(
        t.offences.insert().values(
            rollout_id=rollout_id,
            lease_id=lease_id,
            worker_id=worker_id,
            detail=detail,
            payload=zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL).compress(envelope.payload),
            signature=envelope.signature,
            at=at,
        )
    )


async def get(connection: AsyncConnection, rollout_id: str) -> Row | None:
    return (await connection.execute(select(t.rollouts).where(t.rollouts.c.rollout_id == rollout_id))).first()


async def claimed(connection: AsyncConnection, rollout_ids: Sequence[str], verifier: str) -> list[Row]:
    """Those of these that this verifier still holds, locked, in the order in which they came. Others are not touched: whoever
    judged them meanwhile, they may be on their way to the trainer."""
    return list(await _CLAIMED.execute(connection, rollout_ids, by=verifier))


_STILL_CLAIMED = (t.rollouts.c.state == "verifying") & (t.rollouts.c.verifier == bindparam("by"))
_CLAIMED = many.About(
    lambda mine: (
        select(t.rollouts)
        .where(mine, _STILL_CLAIMED)
        .order_by(t.rollouts.c.received_at)
        .with_for_update(key_share=True)
    ),
    t.rollouts.c.rollout_id,
)


async def count_unconsumed(connection: AsyncConnection) -> int:
    """Received and neither refused nor trained on. A batch that the trainer is still stepping on counts: until that
    step is reported the version stays, and what is generated beyond the batches to come could only become stale."""
    # Two questions: in one, the database may well read all that was ever consumed.
    stepping = list((await connection.execute(_STEPPING)).scalars())
    counted = (await _UNCONSUMED.execute(connection, stepping)).one()
    return int(counted.waiting + counted.served)


_STEPPING = select(t.batches.c.batch).where(
    t.batches.c.acknowledged_at.is_(None), t.batches.c.batch.not_in(select(t.steps.c.batch))
)
_UNCONSUMED = many.About(
    lambda mine: select(
        select(func.count())
        .select_from(t.rollouts)
        .where(t.rollouts.c.state.in_(UNCONSUMED))
        .scalar_subquery()
        .label("waiting"),
        select(func.count()).select_from(t.consumptions).where(mine).scalar_subquery().label("served"),
    ),
    t.consumptions.c.batch,
)


async def claim(connection: AsyncConnection, *, verifier: str, limit: int, at: float, term: float) -> list[str]:
    """Claim rollouts to verify: pending ones that need not wait, and those whose claim has run out (their verifier died).

    SKIP LOCKED lets verifiers run side by side. What was claimed, `pending` reads.
    """
    free = t.rollouts.c.state.in_(("pending", "verifying")) & (
        t.rollouts.c.claim_deadline.is_(None) | (t.rollouts.c.claim_deadline <= at)
    )
    # Two verifiers died with it: the third looks at it alone, and only when there is nothing else to do.
    suspect = (t.rollouts.c.state == "verifying") & (t.rollouts.c.attempts >= 2)
    rows = list(
        await connection.execute(
            select(t.rollouts.c.rollout_id, suspect.label("suspect"))
            .where(free)
            .order_by(suspect, t.rollouts.c.received_at)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
    )
    ids = [row.rollout_id for row in rows if not row.suspect] or [row.rollout_id for row in rows[:1]]
    if ids:
        await _CLAIM.execute(connection, ids, by=verifier, until=at + term)
    return ids


_CLAIM = many.About(
    lambda mine: (
        update(t.rollouts)
        .where(mine)
        .values(
            state="verifying",
            verifier=bindparam("by"),
            claim_deadline=bindparam("until"),
            attempts=t.rollouts.c.attempts + 1,
        )
    ),
    t.rollouts.c.rollout_id,
)


async def hold(connection: AsyncConnection, rollout_ids: Sequence[str], *, verifier: str, until: float) -> None:
    """Let nobody else claim those of these that this verifier has claimed before `until`."""
    await _HOLD.execute(connection, rollout_ids, by=verifier, until=until)


_HOLD = many.About(
    lambda mine: update(t.rollouts).where(mine, _STILL_CLAIMED).values(claim_deadline=bindparam("until")),
    t.rollouts.c.rollout_id,
)


async def postpone(connection: AsyncConnection, rollout_id: str, *, until: float) -> None:
    """Let it be claimed again, by anyone, but not before `until`."""
    await connection.execute(
        update(t.rollouts)
        .where(t.rollouts.c.rollout_id == rollout_id)
        .values(state="pending", verifier=None, claim_deadline=until)
    )


async def abandoned(connection: AsyncConnection, *, at: float, attempts: int) -> list[Row]:
    """Rollouts that were claimed so often, and whose newest claim ran out."""
    return list(
        await connection.execute(
            select(t.rollouts).where(
                t.rollouts.c.state == "verifying", t.rollouts.c.claim_deadline <= at, t.rollouts.c.attempts >= attempts
            )
        )
    )


async def pending(connection: AsyncConnection, ids: Sequence[str], probation_rollouts: int) -> list[PendingRollout]:
    """All that judging these needs. Rows of one group are neighbours, so that its prompt is prefilled once."""
    if not ids:
        return []
    rows = await _PENDING.execute(connection, ids)
    return [
        PendingRollout(
            rollout_id=row.rollout_id,
            worker_id=row.worker_id,
            rollout=rollout_from_store(unpack_payload(row.payload)),
            group_id=row.group_id,
            environment=row.environment,
            task_index=row.task_index,
            prompt=row.prompt,
            prompt_token_ids=unpack_tokens(row.prompt_token_ids),
            reference=row.reference,
            max_tokens=row.max_tokens,
            seed=row.seed,
            attempts=row.attempts,
            newcomer=row.accepted < probation_rollouts or row.shadow,
            clean_tokens=row.clean_tokens,
            watched=row.watched,
        )
        for row in rows
    ]


_PENDING = many.About(
    lambda mine: (
        select(
            t.rollouts.c.rollout_id,
            t.rollouts.c.worker_id,
            t.rollouts.c.attempts,
            t.payloads.c.payload,
            t.groups.c.group_id,
            t.groups.c.environment,
            t.groups.c.task_index,
            t.groups.c.prompt,
            t.groups.c.prompt_token_ids,
            t.groups.c.reference,
            t.groups.c.max_tokens,
            t.samples.c.seed,
            t.workers.c.accepted,
            t.workers.c.clean_tokens,
            t.workers.c.watched,
            t.leases.c.shadow,
        )
        .join(t.payloads, t.payloads.c.rollout_id == t.rollouts.c.rollout_id)
        .join(t.groups, t.groups.c.group_id == t.rollouts.c.group_id)
        .join(t.samples, t.samples.c.sample_id == t.rollouts.c.sample_id)
        .join(t.workers, t.workers.c.worker_id == t.rollouts.c.worker_id)
        .join(t.leases, t.leases.c.lease_id == t.rollouts.c.lease_id)
        .where(mine)
        .order_by(t.groups.c.ordinal, t.samples.c.ordinal)
    ),
    t.rollouts.c.rollout_id,
)


class _Decompressor(threading.local):
    """Each thread's own: to make one takes thirty times as long as to unpack a rollout by it."""

    def __init__(self) -> None:
        self.own = zstandard.ZstdDecompressor()


_DECOMPRESSOR = _Decompressor()


def unpack_payload(packed: bytes) -> bytes:
    return _DECOMPRESSOR.own.decompress(packed, max_output_size=_PAYLOAD_BYTES_MAX)


async def set_state(
    connection: AsyncConnection, rollout_ids: Sequence[str], state: str, drop_reason: str | None = None
) -> None:
    if rollout_ids:
        await _SET_STATE.execute(connection, rollout_ids, to_state=state, because=drop_reason)


_SET_STATE = many.About(
    lambda mine: update(t.rollouts).where(mine).values(state=bindparam("to_state"), drop_reason=bindparam("because")),
    t.rollouts.c.rollout_id,
)


async def drop(connection: AsyncConnection, row: Row, reason: str, at: float, *, again: bool) -> None:
    """Take an unconsumed rollout out of the run, counted by reason and length. `again`: its sample is leased again, if its
    group is not closed."""
    await set_state(connection, [row.rollout_id], "dropped", reason)
    if again:
        await groups.free_samples(connection, [row.sample_id])
    else:
        await groups.set_samples(connection, [row.sample_id], "dropped")
    await events.count_drop(connection, at=at, reason=reason, tokens=row.tokens, rollout_id=row.rollout_id)


async def unconsumed_of_worker(connection: AsyncConnection, worker_id: str) -> list[Row]:
    return list(
        await connection.execute(
            select(t.rollouts).where(t.rollouts.c.worker_id == worker_id, t.rollouts.c.state.in_(UNCONSUMED))
        )
    )


async def unconsumed_after(connection: AsyncConnection, version: int) -> list[Row]:
    """Those with a token of a later version than this."""
    return list(
        await connection.execute(
            select(t.rollouts).where(t.rollouts.c.newest_version > version, t.rollouts.c.state.in_(UNCONSUMED))
        )
    )


async def count_pending_of_worker(connection: AsyncConnection, worker_id: str) -> int:
    """Received from this worker and not judged yet."""
    statement = select(func.count()).where(
        t.rollouts.c.worker_id == worker_id, t.rollouts.c.state.in_(("pending", "verifying"))
    )
    return int((await connection.execute(statement)).scalar_one())


async def latest_verdicts(connection: AsyncConnection, worker_id: str, limit: int) -> list[Row]:
    """The newest verdicts on what the worker handed in of late, newest first: what each found, in words."""
    judged = (t.rollouts.c.worker_id == worker_id) & t.rollouts.c.state.not_in(("pending", "verifying"))
    # Verdicts come in nearly the order of receipts. To sort all of a worker takes the longer, the longer it has been here.
    of_late = select(t.rollouts.c.rollout_id).where(judged).order_by(t.rollouts.c.received_at.desc())
    late = of_late.limit(limit + _OUT_OF_ORDER).subquery()
    v = t.verdicts.c
    return list(
        await connection.execute(
            select(v.rollout_id, v.outcome, v.reason, v.detail, v.metrics, v.admitted)
            .join(late, late.c.rollout_id == v.rollout_id)
            .order_by(v.verified_at.desc())
            .limit(limit)
        )
    )
