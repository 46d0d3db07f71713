"""Executes the trainer's side: versions announced, groups served once, batches acknowledged, steps reported.

A group is assigned to a batch when it is first served; the same batch number gets it again after a crash of either side,
until a checkpoint acknowledges the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import Row, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator import groups as rules
from coordinator import step_alarms
from coordinator.groups import Drop, Member, Reopen, Serve
from coordinator.scheduling import Scheduling
from coordinator.store import database, events, groups, leases, many, rollouts, versions
from coordinator.store import tables as t
from coordinator.store.database import Database, Lane, among
from coordinator.store.groups import unpack_tokens
from coordinator.withdrawal import Withdrawal, withdraw
from protocol.errors import UserError
from protocol.lease import LeaseState, finish
from protocol.manifest import manifest_digest
from protocol.policy import PolicyVersion, staleness
from protocol.rotation import KeyRing
from protocol.signing import SignedEnvelope
from protocol.wire import tokens_on_wire, verified_to_wire
from protos.rollswarm.v1 import trainer_pb2

_CANDIDATES = 64
_LOADED_AT_ONCE = 8  # groups
_ANSWER_TOKENS = 4 << 20  # some 14 bytes each; a message has at most 256 MiB, and one group may go over this


class Feeding:
    """What the trainer may ask of the run."""

    def __init__(self, db: Database, *, run_id: str, trainer_key: str, scheduling: Scheduling) -> None:
        self._db = db
        self._run_id = run_id
        self._keys = KeyRing.of([trainer_key])
        self._scheduling = scheduling

    def use(self, scheduling: Scheduling) -> None:
        """Go by these numbers from the next call on."""
        self._scheduling = scheduling

    async def state(self) -> tuple[PolicyVersion | None, int]:
        """The head version, and the first batch that is not acknowledged."""
        async with self._db.read() as connection:
            last = select(func.max(t.batches.c.batch)).where(t.batches.c.acknowledged_at.is_not(None))
            acknowledged = (await connection.execute(last)).scalar()
            return await versions.head(connection), 0 if acknowledged is None else acknowledged + 1

    async def announce(self, envelope: SignedEnvelope, rotations: Sequence[SignedEnvelope] = ()) -> int:
        """Record a signed version and return the head. Raises UserError or BadSignature if it can't be.

        `rotations`: statements that lead from the key that the run pins to the one that signed.
        """
        self._keys, _ = self._keys.follow(rotations)
        manifest = self._keys.open_manifest(envelope)
        if manifest.run_id != self._run_id:
            raise UserError(f"the manifest is of run {manifest.run_id!r}, this is {self._run_id!r}")
        async with self._db.write(Lane.TRAINING) as connection:
            at = await database.now(connection)
            digest = str(manifest_digest(envelope.payload))
            if await versions.announce(
                connection, version=manifest.policy_version, digest=digest, envelope=envelope, at=at
            ):
                await events.record(
                    connection,
                    at=at,
                    actor="trainer",
                    action="version",
                    subject=str(manifest.policy_version),
                    detail=digest,
                )
            head = await versions.head(connection)
        return 0 if head is None else head.version

    async def pull(
        self, *, batch: int, trainer_version: int, held: Sequence[str], max_groups: int
    ) -> list[trainer_pb2.RolloutGroup]:
        """Groups of this batch that the trainer does not hold yet, as they are sent; new ones while there is room."""
        async with self._db.read() as connection:  # most pulls find nothing new, and need hold up nobody to see that
            known = await _batch(connection, batch)
            news = known is None or known.acknowledged_at is not None
            assigned = [] if news else await groups.of_batch(connection, batch)
            news |= any(group.group_id not in held for group in assigned)
            at = await database.now(connection)
            overdue = len(assigned) < max_groups and bool(await groups.overdue(connection, at, 1))
            if not news and not overdue and len(assigned) < max_groups:
                news = bool(await groups.ready(connection, 1))
        if not news and not overdue:
            return []
        if overdue:  # older than what is ready, and rare
            await self._fill(Lane.FEEDING, batch, trainer_version, max_groups)
        assigned = await self._fill(Lane.TRAINING, batch, trainer_version, max_groups)
        async with self._db.read() as connection:  # what is large, when nobody waits for it any more
            return await self._answer(connection, [group for group in assigned if group.group_id not in set(held)])

    async def _fill(self, lane: Lane, batch: int, trainer_version: int, max_groups: int) -> list[Row]:
        """Open the batch and serve groups in it while there is room; all that are in it. `Lane.TRAINING` serves those that are
        ready, of which nothing is leased, waits, or is under judgement; `Lane.FEEDING` open ones past their deadline."""
        async with self._db.write(lane) as connection:
            at = await database.now(connection)
            await self._open_batch(connection, batch, trainer_version, at)
            assigned = await groups.of_batch(connection, batch)
            candidates: list[Row] = []
            if len(assigned) < max_groups:
                if lane is Lane.TRAINING:
                    candidates = await groups.ready(connection, _CANDIDATES)
                else:
                    candidates = await groups.overdue(connection, at, _CANDIDATES)
                    # Locked here in order: group by group, they would meet those who lock many leases in another order.
                    await leases.live_of_groups(connection, [group.group_id for group in candidates])
            while candidates and len(assigned) < max_groups:
                missing = max_groups - len(assigned)
                assigned += await self._offer(connection, candidates[:missing], batch, trainer_version, at)
                candidates = candidates[missing:]
            return assigned

    async def _answer(self, connection: AsyncConnection, wanted: Sequence[Row]) -> list[trainer_pb2.RolloutGroup]:
        """As many groups as a message may hold, at least one; the trainer asks again for the others."""
        answer: list[trainer_pb2.RolloutGroup] = []
        tokens = 0
        for begin in range(0, len(wanted), _LOADED_AT_ONCE):
            for group in await self._load(connection, wanted[begin : begin + _LOADED_AT_ONCE]):
                answer.append(group)
                tokens += tokens_on_wire(group)
                if tokens >= _ANSWER_TOKENS:
                    return answer
        return answer

    async def _open_batch(self, connection: AsyncConnection, batch: int, trainer_version: int, at: float) -> None:
        known = await _batch(connection, batch)
        if known is not None:
            if known.acknowledged_at is not None:
                raise UserError(f"batch {batch} is acknowledged: a checkpoint holds it; resume from that checkpoint")
            return
        await connection.execute(t.batches.insert().values(batch=batch, trainer_version=trainer_version, opened_at=at))

    async def _offer(
        self, connection: AsyncConnection, offered: Sequence[Row], batch: int, trainer_version: int, at: float
    ) -> list[Row]:
        """Apply the staleness gate to these groups; those that are served now."""
        accepted = await groups.accepted_rollouts(connection, [group.group_id for group in offered])
        served: list[tuple[Row, Serve]] = []
        for group in offered:
            rows = {row.rollout_id: row for row in accepted[group.group_id]}
            decision = rules.decide(
                [Member(row.rollout_id, row.oldest_version) for row in rows.values()],
                trainer_version=trainer_version,
                max_staleness=self._scheduling.max_staleness,
                min_group=self._scheduling.min_group,
                past_deadline=at >= group.deadline,
            )
            for rollout_id in decision.stale:
                await rollouts.drop(connection, rows[rollout_id], "stale", at, again=isinstance(decision, Reopen))
            if isinstance(decision, Reopen):
                await groups.set_state(connection, group.group_id, "open")
            elif isinstance(decision, Drop):
                await self._close(connection, [group.group_id])
                for rollout_id in decision.orphaned:
                    await rollouts.drop(connection, rows[rollout_id], "incomplete_group", at, again=False)
                await groups.set_state(connection, group.group_id, "dropped")
            else:
                served.append((group, decision))
        await self._serve(connection, served, accepted, batch, trainer_version)
        return [group for group, _ in served]

    async def _close(self, connection: AsyncConnection, group_ids: Sequence[str]) -> None:
        """Nothing more is generated for these groups."""
        out = await leases.live_of_groups(connection, group_ids)
        await leases.save_many(connection, [finish(lease, LeaseState.REVOKED) for lease in out])
        await groups.drop_samples(connection, group_ids)

    async def _serve(
        self,
        connection: AsyncConnection,
        served: Sequence[tuple[Row, Serve]],
        accepted: Mapping[str, Sequence[Row]],
        batch: int,
        trainer_version: int,
    ) -> None:
        if not served:
            return
        ids = [group.group_id for group, _ in served]
        fresh = {rollout_id for _, decision in served for rollout_id in decision.fresh}
        await self._close(connection, ids)
        await groups.assign(connection, ids, batch)
        await rollouts.set_state(connection, sorted(fresh), "served")
        await many.insert(
            connection,
            t.consumptions,
            [
                {
                    "rollout_id": row.rollout_id,
                    "batch": batch,
                    "staleness": staleness(trainer_version, row.oldest_version),
                    "trained": False,
                }
                for group_id in ids
                for row in accepted[group_id]
                if row.rollout_id in fresh
            ],
        )

    async def _load(self, connection: AsyncConnection, wanted: Sequence[Row]) -> list[trainer_pb2.RolloutGroup]:
        rows = await connection.execute(
            select(
                t.rollouts.c.group_id,
                t.rollouts.c.rollout_id,
                t.rollouts.c.sample_id,
                t.rollouts.c.worker_id,
                t.payloads.c.payload,
                t.verdicts.c.reward,
                t.verdicts.c.old_logprobs,
                t.verdicts.c.audited,
            )
            .join(t.payloads, t.payloads.c.rollout_id == t.rollouts.c.rollout_id)
            .join(t.verdicts, t.verdicts.c.rollout_id == t.rollouts.c.rollout_id)
            .join(t.consumptions, t.consumptions.c.rollout_id == t.rollouts.c.rollout_id)
            .where(among(connection, t.rollouts.c.group_id, [group.group_id for group in wanted]))
            .order_by(t.rollouts.c.sample_id)
        )
        members: dict[str, list[trainer_pb2.VerifiedRollout]] = {group.group_id: [] for group in wanted}
        for row in rows:
            members[row.group_id].append(
                verified_to_wire(
                    rollouts.unpack_payload(row.payload),
                    rollout_id=row.rollout_id,
                    sample_id=row.sample_id,
                    worker_id=row.worker_id,
                    reward=row.reward,
                    old_logprobs=row.old_logprobs,
                    audited=row.audited,
                )
            )
        return [
            trainer_pb2.RolloutGroup(
                group_id=group.group_id,
                task_id=f"{group.environment}/{group.task_index}",
                environment=group.environment,
                prompt_token_ids=unpack_tokens(group.prompt_token_ids),
                n_requested=group.n_samples,
                rollouts=members[group.group_id],
            )
            for group in wanted
        ]

    async def acknowledge(self, through_batch: int) -> int:
        """A checkpoint holds every batch up to this one: they are never served again. Returns how many were new."""
        async with self._db.write(Lane.TRAINING) as connection:
            at = await database.now(connection)
            rows = await connection.execute(
                select(t.batches.c.batch).where(
                    t.batches.c.batch <= through_batch, t.batches.c.acknowledged_at.is_(None)
                )
            )
            numbers = [row.batch for row in rows]
            if not numbers:
                return 0
            await connection.execute(update(t.batches).where(t.batches.c.batch.in_(numbers)).values(acknowledged_at=at))
            await connection.execute(update(t.groups).where(t.groups.c.batch.in_(numbers)).values(state="done"))
            served = select(t.consumptions.c.rollout_id).where(t.consumptions.c.batch.in_(numbers))
            await connection.execute(
                update(t.rollouts).where(t.rollouts.c.rollout_id.in_(served)).values(state="trained")
            )
            return len(numbers)

    async def withdraw(self, after: int) -> Withdrawal:
        """Take back every version after `after`; see `coordinator.withdrawal`."""
        return await withdraw(self._db, after=after)

    async def report(
        self,
        *,
        batch: int,
        trainer_version: int,
        optimizer_steps: int,
        metrics: Mapping[str, float],
        dropped: Mapping[str, int],
        trained: Sequence[str],
        alarms: Mapping[str, str] | None = None,
    ) -> None:
        """Record what a step did. A repeated report (after a crash) replaces the earlier one.

        A number that is not finite is left out: JSON has none, and PostgreSQL would refuse the whole report.
        `alarms`: those that last, a sentence by name; one that begins or ends is an audit event.
        """
        alarms = alarms or {}
        async with self._db.write(Lane.TRAINING) as connection:
            at = await database.now(connection)
            await self._record_alarms(connection, batch, trainer_version, alarms, at)
            await connection.execute(t.steps.delete().where(t.steps.c.batch == batch))
            await connection.execute(
                t.steps.insert().values(
                    batch=batch,
                    trainer_version=trainer_version,
                    optimizer_steps=optimizer_steps,
                    metrics=step_alarms.with_alarms(events.finite(metrics), alarms),
                    dropped=dict(dropped),
                    reported_at=at,
                )
            )
            await connection.execute(
                update(t.consumptions)
                .where(t.consumptions.c.batch == batch, among(connection, t.consumptions.c.rollout_id, list(trained)))
                .values(trained=True)
            )

    async def _record_alarms(
        self, connection: AsyncConnection, batch: int, trainer_version: int, alarms: Mapping[str, str], at: float
    ) -> None:
        """Call before the step's earlier report is replaced."""
        rows = await connection.execute(
            select(t.steps.c.batch, t.steps.c.metrics).where(t.steps.c.batch.in_((batch - 1, batch)))
        )
        known = {row.batch: step_alarms.lasting(row.metrics) for row in rows}
        begun, over = step_alarms.changes(alarms, known.get(batch - 1, frozenset()), known.get(batch))
        where = f"batch {batch}, version {trainer_version}"
        for name in begun:
            await events.record(
                connection,
                at=at,
                actor="trainer",
                action="trainer_alarm",
                subject=name,
                detail=f"{alarms[name]} ({where})",
            )
        for name in over:
            await events.record(
                connection, at=at, actor="trainer", action="trainer_alarm_over", subject=name, detail=where
            )


async def _batch(connection: AsyncConnection, batch: int) -> Row | None:
    return (await connection.execute(select(t.batches).where(t.batches.c.batch == batch))).first()
