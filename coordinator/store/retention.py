"""Forgets payloads (tokens, log-probs, proofs) that nobody will ask for again. What was decided about them stays for ever.

A trained rollout's payload goes so many days after the checkpoint that holds it acknowledged its batch; a rejected or dropped
one's later, for its worker may appeal. Never one that is pending, accepted or served.
"""

from __future__ import annotations

from sqlalchemy import Select, delete, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store import tables as t


async def forget(connection: AsyncConnection, *, trained_before: float, others_before: float, limit: int) -> int:
    """Forget at most `limit` payloads of each kind; how many there were. Times are of the database's clock."""
    forgotten = 0
    for chosen in (_trained(trained_before), _others(others_before)):
        ids = list((await connection.execute(chosen.limit(limit))).scalars())
        if not ids:
            continue
        await connection.execute(delete(t.payloads).where(t.payloads.c.rollout_id.in_(ids)))
        await connection.execute(
            update(t.verdicts).where(t.verdicts.c.rollout_id.in_(ids)).values(old_logprobs=b"", entropies=b"")
        )
        forgotten += len(ids)
    return forgotten


def _trained(before: float) -> Select[tuple[str]]:
    return (
        select(t.payloads.c.rollout_id)
        .join(t.rollouts, t.rollouts.c.rollout_id == t.payloads.c.rollout_id)
        .join(t.consumptions, t.consumptions.c.rollout_id == t.rollouts.c.rollout_id)
        .join(t.batches, t.batches.c.batch == t.consumptions.c.batch)
        .where(t.rollouts.c.state == "trained", t.batches.c.acknowledged_at < before)
    )


def _others(before: float) -> Select[tuple[str]]:
    return (
        select(t.payloads.c.rollout_id)
        .join(t.rollouts, t.rollouts.c.rollout_id == t.payloads.c.rollout_id)
        .where(t.rollouts.c.state.in_(("rejected", "dropped")), t.rollouts.c.received_at < before)
    )
