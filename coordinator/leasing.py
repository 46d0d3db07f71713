"""Executes leasing: acquire, renew, return, and the return of what has expired.

Deadlines go by the database's clock. Called by the gRPC service, and knows nothing of gRPC. Workers that ask for leases at the
same time are served in one transaction (`coordinator.granting`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.granting import Granted, Granting, Request
from coordinator.grouping import EnvironmentShare, GroupMaker
from coordinator.hardware import HardwareRules
from coordinator.scheduling import EXACT, Freshness, Scheduling
from coordinator.store import database, leases, versions, workers
from coordinator.store.database import Database, Lane
from coordinator.store.leases import Held
from coordinator.together import Together
from protocol import lease as lease_rules
from protocol.errors import WorkerFault
from protocol.lease import Commitment, Lease, LeaseState
from protocol.policy import oldest_admissible
from protocol.rollout import RejectionReason

log = logging.getLogger(__name__)

_MOST = 64  # workers in one transaction
Returned = tuple[str, tuple[str, ...]]  # a worker's leases
Progress = tuple[str, tuple[tuple[str, Commitment], ...]]  # a worker's, by lease


@dataclass(frozen=True, slots=True)
class Renewal:
    """A lease after a renewal; `problem` is set if it is not live."""

    lease_id: str
    deadline: float
    problem: str = ""


class Leasing:
    """Grants samples to workers."""

    def __init__(
        self,
        db: Database,
        *,
        secret: bytes,
        scheduling: Scheduling,
        environments: Sequence[EnvironmentShare],
        tokenize: Callable[[str], Sequence[int]],
        max_prompt_tokens: int = 4096,
        hardware_rules: HardwareRules | None = None,
        freshness: Freshness = EXACT,
    ) -> None:
        self._db = db
        self._scheduling = scheduling
        maker = GroupMaker(
            secret=secret, environments=environments, tokenize=tokenize, max_prompt_tokens=max_prompt_tokens
        )
        self._freshness = freshness
        self._looked_for_overdue = 0.0
        self._granting = Granting(scheduling, maker, hardware_rules or HardwareRules(), freshness)
        self._together = Together(self.acquire_many, _MOST, self.abandon)
        self._returning: Together[Returned, int] = Together(self._give_back_many, _MOST)
        self._abandoned: set[asyncio.Task[int]] = set()
        self._renewing: Together[Progress, tuple[list[Renewal], int]] = Together(self._renew_many, _MOST)

    def use(self, scheduling: Scheduling) -> None:
        """Go by these numbers from the next call on."""
        self._scheduling = self._granting.scheduling = scheduling

    async def acquire(self, worker_id: str, wanted: int) -> Granted:
        """Grant up to `wanted` leases. Raises WorkerFault if the worker is banned or unknown."""
        return await self._together.do(Request(worker_id, wanted))

    async def acquire_many(self, requests: Sequence[Request]) -> list[Granted | WorkerFault]:
        """Grant leases to several workers in one transaction, the first first."""
        async with self._db.write(Lane.GRANTS) as connection:
            at = await database.now(connection)
            if not self._looked_for_overdue <= at < self._looked_for_overdue + self._freshness.overdue_s:
                await self._expire(connection, at)
            return await self._granting.grant(connection, requests, at)

    async def has_room(self) -> bool:
        """Whether anybody could get anything now: one cheap read."""
        async with self._db.read() as connection:
            return await self._granting.has_room(connection)

    async def renew(self, worker_id: str, progress: Sequence[tuple[str, Commitment]]) -> tuple[list[Renewal], int]:
        """Extend leases and commit to progress; also returns the head version.

        A lease whose rollout could no longer be accepted is revoked, so that the worker stops at once; one whose progress
        can't be is given back by that.
        """
        return await self._renewing.do((worker_id, tuple(progress)))

    async def _renew_many(self, asked: Sequence[Progress]) -> list[tuple[list[Renewal], int]]:
        """What several workers report, in one transaction."""
        async with self._db.write(Lane.ROWS) as connection:
            at = await database.now(connection)
            held = await leases.held(connection, (lease_id for _, progress in asked for lease_id, _ in progress))
            head = await versions.head(connection)
            version = 0 if head is None else head.version
            answers: list[tuple[list[Renewal], int]] = []
            changed: dict[str, Lease] = {}
            for worker_id, progress in asked:
                renewals: list[Renewal] = []
                for lease_id, commitment in progress:
                    mine = held.get(lease_id)
                    if mine is None or mine.lease.worker_id != worker_id:
                        renewals.append(Renewal(lease_id, 0.0, "there is no such lease of yours"))
                        continue
                    now = replace(mine, lease=changed.get(lease_id, mine.lease))
                    lease, problem = self._renewed(now, commitment, at, version)
                    if lease != mine.lease:
                        changed[lease_id] = lease
                    renewals.append(Renewal(lease_id, 0.0 if problem else lease.deadline, problem))
                answers.append((renewals, version))
            await leases.save_many(connection, list(changed.values()))
            await workers.seen(connection, sorted({worker_id for worker_id, _ in asked}), at)
        return answers

    def _renewed(self, held: Held, commitment: Commitment, at: float, head: int) -> tuple[Lease, str]:
        """The lease afterwards, and what is wrong with it, if anything."""
        lease = lease_rules.expire(held.lease, at)
        try:
            renewed = lease_rules.renew(
                lease,
                commitment,
                now=at,
                term=self._scheduling.lease_term_s,
                oldest=oldest_admissible(head, self._scheduling.max_staleness),
                head=head,
                max_tokens=held.max_tokens,
                pause=self._scheduling.lease_term_s * self._freshness.renewal_terms,
            )
        except WorkerFault as fault:
            if lease.state is not LeaseState.LIVE:
                return lease, fault.detail
            # Who reports what can't be gives the sample up, and is counted among those who do.
            end = LeaseState.REVOKED if fault.reason is RejectionReason.STALE else LeaseState.RETURNED
            return lease_rules.finish(lease, end), fault.detail
        return renewed, ""

    async def give_back(self, worker_id: str, lease_ids: Sequence[str]) -> int:
        """Free the worker's live leases; how many there were."""
        return await self._returning.do((worker_id, tuple(lease_ids)))

    async def _give_back_many(self, asked: Sequence[Returned]) -> list[int]:
        async with self._db.write(Lane.ROWS) as connection:
            held = await leases.held(connection, (lease_id for _, ids in asked for lease_id in ids))
            ended: dict[str, Lease] = {}
            counts = []
            for worker_id, ids in asked:
                mine = {
                    lease_id
                    for lease_id in ids
                    if lease_id in held
                    and lease_id not in ended
                    and held[lease_id].lease.worker_id == worker_id
                    and held[lease_id].lease.state is LeaseState.LIVE
                }
                ended |= {each: lease_rules.finish(held[each].lease, LeaseState.RETURNED) for each in mine}
                counts.append(len(mine))
            await leases.save_many(connection, list(ended.values()))
        return counts

    def abandon(self, request: Request, granted: Granted) -> None:
        """Give back what was granted to a caller that went away meanwhile: nobody knows of these leases."""
        if granted.leases:
            ids = [lease.lease_id for lease, _ in granted.leases]
            task = asyncio.ensure_future(self.give_back(request.worker_id, ids))
            self._abandoned.add(task)
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[int]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.warning("leases that nobody knows of run out: %r", task.exception(), extra={"action": "abandon"})

    async def live_among(self, worker_id: str, lease_ids: Sequence[str]) -> set[str]:
        """Those of these leases that are the worker's and live: only about them anything it says is worth a look."""
        async with self._db.read() as connection:
            return await leases.live_among(connection, worker_id, lease_ids)

    async def expire(self) -> int:
        """Free what is overdue; how many leases there were."""
        async with self._db.write(Lane.ROWS) as connection:
            return await self._expire(connection, await database.now(connection))

    async def _expire(self, connection: AsyncConnection, at: float) -> int:
        self._looked_for_overdue = at
        overdue = await leases.overdue(connection, at)
        await leases.save_many(connection, [lease_rules.expire(lease, at) for lease in overdue])
        return len(overdue)
