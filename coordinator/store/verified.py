"""Verified rollouts with everything about them, page by page, in the order in which they were received."""

from __future__ import annotations

from sqlalchemy import Row, and_, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store import tables as t


async def page(
    connection: AsyncConnection, *, after: tuple[float, str], limit: int, outcomes: tuple[str, ...]
) -> list[Row]:
    """The next rows behind (received_at, rollout_id). Those whose payload was forgotten are left out."""
    at, last = after
    later = or_(t.rollouts.c.received_at > at, and_(t.rollouts.c.received_at == at, t.rollouts.c.rollout_id > last))
    rows = await connection.execute(
        select(
            t.rollouts.c.rollout_id,
            t.rollouts.c.sample_id,
            t.rollouts.c.worker_id,
            t.rollouts.c.received_at,
            t.rollouts.c.state,
            t.payloads.c.payload,
            t.payloads.c.signature,
            t.groups.c.group_id,
            t.groups.c.environment,
            t.groups.c.task_index,
            t.groups.c.prompt,
            t.groups.c.prompt_token_ids,
            t.verdicts.c.outcome,
            t.verdicts.c.reason,
            t.verdicts.c.detail,
            t.verdicts.c.reward,
            t.verdicts.c.audited,
            t.verdicts.c.old_logprobs,
            t.verdicts.c.metrics,
            t.verdicts.c.admitted,
            t.verdicts.c.verified_at,
        )
        .join(t.payloads, t.payloads.c.rollout_id == t.rollouts.c.rollout_id)
        .join(t.groups, t.groups.c.group_id == t.rollouts.c.group_id)
        .join(t.verdicts, t.verdicts.c.rollout_id == t.rollouts.c.rollout_id)
        .where(later, t.verdicts.c.outcome.in_(outcomes))
        .order_by(t.rollouts.c.received_at, t.rollouts.c.rollout_id)
        .limit(limit)
    )
    return list(rows)
