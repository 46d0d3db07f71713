"""Forgets payloads (tokens, log-probs, proofs) that nobody will ask for again. What was decided about them stays for ever.

A trained rollout's payload goes so many days after the checkpoint that holds it acknowledged its batch; a rejected or dropped
one's after it was, later, for its worker may appeal. Never one that is pending, accepted or served.

Batches and drops are gone through in their order, each once: a mark says how far.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store import marks
from coordinator.store import tables as t
from coordinator.store.database import among

_BATCHES, _DROPS = "forgotten_batches", "forgotten_drops"


@dataclass(frozen=True, slots=True)
class Forgotten:
    """How many payloads, and whether there may be more whose time is over."""

    payloads: int
    more: bool


async def forget(connection: AsyncConnection, *, trained_before: float, others_before: float, limit: int) -> Forgotten:
    """Forget at most `limit` payloads of each kind. Times are of the database's clock."""
    trained = await _forget_trained(connection, trained_before, limit)
    others = await _forget_others(connection, others_before, limit)
    return Forgotten(trained.payloads + others.payloads, trained.more or others.more)


async def _forget_trained(connection: AsyncConnection, before: float, limit: int) -> Forgotten:
    """Of the first batch that was not gone through yet."""
    mark = int(await marks.seize(connection, _BATCHES))
    first = select(t.batches).where(t.batches.c.batch >= mark).order_by(t.batches.c.batch).limit(1)
    batch = (await connection.execute(first)).first()
    if batch is None or batch.acknowledged_at is None or batch.acknowledged_at >= before:
        return Forgotten(0, False)
    stored = (
        select(t.payloads.c.rollout_id)
        .join(t.consumptions, t.consumptions.c.rollout_id == t.payloads.c.rollout_id)
        .join(t.rollouts, t.rollouts.c.rollout_id == t.payloads.c.rollout_id)
        .where(t.consumptions.c.batch == batch.batch, t.rollouts.c.state == "trained")
        .limit(limit)
    )
    ids = list((await connection.execute(stored)).scalars())
    await _delete(connection, ids)
    if len(ids) < limit:
        await marks.move(connection, _BATCHES, batch.batch + 1)
    return Forgotten(len(ids), True)


async def _forget_others(connection: AsyncConnection, before: float, limit: int) -> Forgotten:
    """Of the first drops that were not gone through yet. Some are of what was never stored, or was taken later."""
    mark = int(await marks.seize(connection, _DROPS))
    following = (t.drops.c.drop_id >= mark) & t.drops.c.rollout_id.is_not(None)
    rows = list(await connection.execute(select(t.drops).where(following).order_by(t.drops.c.drop_id).limit(limit)))
    over = list(itertools.takewhile(lambda row: row.dropped_at < before, rows))
    if not over:
        return Forgotten(0, False)
    stored = (
        select(t.payloads.c.rollout_id)
        .join(t.rollouts, t.rollouts.c.rollout_id == t.payloads.c.rollout_id)
        .where(
            among(connection, t.payloads.c.rollout_id, [row.rollout_id for row in over]),
            t.rollouts.c.state.in_(("rejected", "dropped")),
        )
    )
    ids = list((await connection.execute(stored)).scalars())
    await _delete(connection, ids)
    await marks.move(connection, _DROPS, over[-1].drop_id + 1)
    return Forgotten(len(ids), len(over) == limit)


async def _delete(connection: AsyncConnection, ids: Sequence[str]) -> None:
    if not ids:
        return
    await connection.execute(delete(t.payloads).where(among(connection, t.payloads.c.rollout_id, ids)))
    theirs = among(connection, t.verdicts.c.rollout_id, ids)
    await connection.execute(update(t.verdicts).where(theirs).values(old_logprobs=b"", entropies=b""))
