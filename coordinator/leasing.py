"""Executes leasing: acquire, renew, return, and the return of what has expired.

Every call is one transaction; deadlines go by the database's clock. Called by the gRPC service, and knows nothing of gRPC.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator import dispatch, pace
from coordinator.hardware import HardwareRules, HardwareState, state_of
from coordinator.pace import Pace
from coordinator.store import database, events, groups, hardware, leases, rollouts, run, versions, workers
from coordinator.store import pace as pace_store
from coordinator.store.database import Database
from coordinator.store.groups import LeasableSample, NewGroup
from protocol import lease as lease_rules
from protocol.errors import EnvironmentFault, OurFault, WorkerFault
from protocol.lease import Commitment, Lease, LeaseState
from protocol.ledger import is_newcomer
from protocol.policy import capacity, oldest_admissible
from protocol.rollout import RejectionReason, Task

_BAD_TASKS_MAX = 32


@dataclass(frozen=True, slots=True)
class Scheduling:
    """The numbers that leasing goes by. Sizes are in samples unless named otherwise, times in seconds."""

    groups_per_batch: int
    group_size: int
    min_group: int
    max_staleness: int
    lease_term_s: float
    group_deadline_s: float
    newcomer_share: float
    probation_rollouts: int
    worker_share: float = 1.0
    newcomer_address_share: float = 0.5
    draining: bool = False  # no new groups

    @property
    def batch_samples(self) -> int:
        return self.groups_per_batch * self.group_size


@dataclass(frozen=True, slots=True)
class EnvironmentShare:
    """One environment of the run's mixture. `make_task(index)` and `max_tokens` come from the environment."""

    name: str
    weight: float
    max_tokens: int
    make_task: Callable[[int], Task]


@dataclass(frozen=True, slots=True)
class Granted:
    """Leases with what each needs on the wire; `head` and `reason` go along."""

    leases: tuple[tuple[Lease, LeasableSample], ...]
    head: int
    reason: str
    now: float


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
    ) -> None:
        self._hardware_rules = hardware_rules or HardwareRules()
        self._db = db
        self._secret = secret
        self._scheduling = scheduling
        self._environments = {share.name: share for share in environments}
        self._tokenize = tokenize
        self._max_prompt_tokens = max_prompt_tokens

    def use(self, scheduling: Scheduling) -> None:
        """Go by these numbers from the next call on."""
        self._scheduling = scheduling

    async def acquire(self, worker_id: str, wanted: int) -> Granted:
        """Grant up to `wanted` leases. Raises WorkerFault if the worker is banned or unknown."""
        current = await run.load(self._db)
        assert current is not None
        async with self._db.write() as connection:
            at = await database.now(connection)
            standing = await workers.standing(connection, worker_id)
            if standing is None or standing.banned:
                why = "this key never registered" if standing is None else f"this key is banned: {standing.ban_reason}"
                raise WorkerFault(RejectionReason.LEASE, why)
            await workers.seen(connection, worker_id, at)
            await self._expire(connection, at)
            head = await versions.head(connection)
            if head is None:
                return Granted((), 0, "no policy version is published yet", at)
            trial = await self._trial(connection, worker_id)
            granted = dispatch.grant(
                wanted=wanted,
                newcomer=trial.shadow or is_newcomer(standing, self._scheduling.probation_rollouts),
                paused=current.paused,
                load=await self._load(connection),
                max_staleness=self._scheduling.max_staleness,
                batch_samples=self._scheduling.batch_samples,
                newcomer_share=self._scheduling.newcomer_share,
            )
            if is_newcomer(standing, self._scheduling.probation_rollouts):
                granted = await self._within_address(connection, granted, worker_id, at)
            granted, speed = await self._within_speed(connection, granted, worker_id, at)
            share = await self._share(connection, worker_id, at)
            granted = dispatch.within_share(
                granted, await leases.count_live_of_worker(connection, worker_id), share.leases
            )
            granted = dispatch.within_trial(granted, trial.room)
            if granted.count == 0:
                return Granted((), head.version, granted.reason, at)
            await self._free_stragglers(connection, worker_id, speed, granted.count, at)
            chosen = await self._choose(connection, worker_id, granted.count, share.group_samples, at)
            if not chosen:
                return Granted((), head.version, "draining", at)
            min_version = oldest_admissible(head.version, self._scheduling.max_staleness)
            deadline = at + self._scheduling.lease_term_s
            out = []
            for sample in chosen:
                lease = Lease(secrets.token_hex(16), sample.sample_id, worker_id, min_version, deadline)
                await leases.insert(connection, lease, at, hardware=trial.hardware, shadow=trial.shadow)
                out.append((lease, sample))
            return Granted(tuple(out), head.version, "", at)

    async def renew(self, worker_id: str, progress: Sequence[tuple[str, Commitment]]) -> tuple[list[Renewal], int]:
        """Extend leases and commit to progress; also returns the head version.

        A lease whose rollout could no longer be accepted is revoked, so that the worker stops at once.
        """
        renewals: list[Renewal] = []
        async with self._db.write() as connection:
            at = await database.now(connection)
            await workers.seen(connection, worker_id, at)
            await self._expire(connection, at)
            head = await versions.head(connection)
            version = 0 if head is None else head.version
            for lease_id, commitment in progress:
                lease = await leases.get(connection, lease_id)
                if lease is None or lease.worker_id != worker_id:
                    renewals.append(Renewal(lease_id, 0.0, "there is no such lease of yours"))
                    continue
                renewals.append(await self._renew_one(connection, lease, commitment, at, version))
        return renewals, version

    async def _renew_one(
        self, connection: AsyncConnection, lease: Lease, commitment: Commitment, at: float, head: int
    ) -> Renewal:
        try:
            renewed = lease_rules.renew(
                lease,
                commitment,
                now=at,
                term=self._scheduling.lease_term_s,
                oldest=oldest_admissible(head, self._scheduling.max_staleness),
            )
        except WorkerFault as fault:
            if lease.state is LeaseState.LIVE:
                await leases.release(connection, lease_rules.finish(lease, LeaseState.REVOKED))
            return Renewal(lease.lease_id, 0.0, fault.detail)
        await leases.save(connection, renewed)
        return Renewal(lease.lease_id, renewed.deadline)

    async def give_back(self, worker_id: str, lease_ids: Sequence[str]) -> int:
        """Free the worker's live leases; how many there were."""
        returned = 0
        async with self._db.write() as connection:
            for lease_id in lease_ids:
                lease = await leases.get(connection, lease_id)
                if lease is not None and lease.worker_id == worker_id and lease.state is LeaseState.LIVE:
                    await leases.release(connection, lease_rules.finish(lease, LeaseState.RETURNED))
                    returned += 1
        return returned

    async def expire(self) -> int:
        """Free what is overdue; how many leases there were."""
        async with self._db.write() as connection:
            return await self._expire(connection, await database.now(connection))

    async def _expire(self, connection: AsyncConnection, at: float) -> int:
        overdue = await leases.overdue(connection, at)
        for lease in overdue:
            await leases.release(connection, lease_rules.expire(lease, at))
        return len(overdue)

    async def _load(self, connection: AsyncConnection) -> dispatch.Load:
        return dispatch.Load(
            leased=await leases.count_live(connection),
            unconsumed=await rollouts.count_unconsumed(connection),
            newcomers_leased=await leases.count_live_of_newcomers(connection, self._scheduling.probation_rollouts),
        )

    async def _within_address(
        self, connection: AsyncConnection, granted: dispatch.Grant, worker_id: str, at: float
    ) -> dispatch.Grant:
        """A newcomer's grant, bounded by what all newcomers from its address have."""
        scheduling = self._scheduling
        address = await workers.address(connection, worker_id)
        since, probation = at - scheduling.lease_term_s, scheduling.probation_rollouts
        most = dispatch.newcomers_of_address(
            scheduling.newcomer_share,
            scheduling.newcomer_address_share,
            capacity(scheduling.max_staleness, scheduling.batch_samples),
            others_wait=await workers.newcomers_elsewhere(connection, address, probation, since),
        )
        held = await leases.count_live_of_newcomers(connection, probation, address)
        return dispatch.within_share(granted, held, most, "newcomers")

    async def _within_speed(
        self, connection: AsyncConnection, granted: dispatch.Grant, worker_id: str, at: float
    ) -> tuple[dispatch.Grant, Pace | None]:
        """A grant of what the worker, as fast as it was of late, finishes while it can still be accepted."""
        measured = await pace_store.of_worker(connection, worker_id, at)
        horizon = pace.horizon_s(await pace_store.step_s(connection, at), self._scheduling.max_staleness)
        if pace.too_slow(measured, horizon):
            return dispatch.Grant(0, "too slow"), measured
        live = await leases.count_live_of_worker(connection, worker_id)
        return dispatch.within_share(granted, live, pace.most_leases(measured, horizon), "speed"), measured

    async def _free_stragglers(
        self, connection: AsyncConnection, worker_id: str, measured: Pace | None, most: int, at: float
    ) -> None:
        """Revoke leases that hold up a group which this much faster worker can end; their samples wait, with the same seed.

        There is one live lease per sample, also here: the straggler is told at its next renewal, and loses nothing but work.
        """
        if measured is None:
            return
        term = self._scheduling.lease_term_s
        out = await pace_store.stragglers(connection, worker_id, at, term)
        for each in pace.take_over(out, measured, term, most):
            lease = await leases.get(connection, each.lease_id)
            assert lease is not None
            await leases.release(connection, lease_rules.finish(lease, LeaseState.REVOKED))
            detail = f"{each.committed} of at most {each.max_tokens} tokens after {each.age_s:.0f} s"
            await events.record(
                connection, at=at, actor="coordinator", action="take_over", subject=lease.sample_id, detail=detail
            )

    async def _trial(self, connection: AsyncConnection, worker_id: str) -> dispatch.Trial:
        """Whether the worker's hardware is taken at its word, and how much is left of trying it out."""
        declared = await workers.declared(connection, worker_id)
        assert declared is not None
        rules, name = self._hardware_rules, declared.hardware
        state = state_of(name, declared.precision, await hardware.decision(connection, name), rules)
        if state is HardwareState.ADMITTED:
            return dispatch.Trial(name, False, None)
        if state is HardwareState.REFUSED:
            return dispatch.Trial(name, True, 0)
        return dispatch.Trial(name, True, max(0, rules.shadow_rollouts - await hardware.count_used(connection, name)))

    async def _share(self, connection: AsyncConnection, worker_id: str, at: float) -> dispatch.Share:
        """What this worker may have of each group, and of all leases."""
        scheduling = self._scheduling
        if scheduling.worker_share >= 1.0:
            return dispatch.EVERYTHING
        since = at - scheduling.lease_term_s
        return dispatch.share_of(
            scheduling.worker_share,
            others_active=await workers.others_active(connection, worker_id, since),
            group_size=scheduling.group_size,
            capacity=capacity(scheduling.max_staleness, scheduling.batch_samples),
        )

    async def _choose(
        self, connection: AsyncConnection, worker_id: str, count: int, group_samples: int | None, at: float
    ) -> list[LeasableSample]:
        """Waiting samples, oldest first; new groups are made while there are too few.

        Where only this worker's share of the waiting groups is used up, it gets fewer, unless it would get none: others
        are there to take them, and every new group delays those that are open.
        """
        held = await leases.waiting_held_before(connection, worker_id)
        while True:
            used = {} if group_samples is None else await groups.used_by_worker(connection, worker_id)
            full = [group_id for group_id, n in used.items() if group_samples is not None and n >= group_samples]
            found = await groups.waiting(connection, count + len(held), but=full)
            by_id = {sample.sample_id: sample for sample in found}
            ordered = [by_id[sample_id] for sample_id in dispatch.order_for_worker(list(by_id), held)]
            chosen = dispatch.within_groups(ordered, used, group_samples)[:count]
            enough = len(found) >= count or bool(full)
            if len(chosen) >= count or (chosen and enough) or self._scheduling.draining:
                return chosen
            await self._new_group(connection, at)

    async def _new_group(self, connection: AsyncConnection, at: float) -> None:
        """Make the next group. A task that can't be made or asked is passed over, with an audit event.

        Raises OurFault if too many in a row are: then the environment is broken, and its operator must look.
        """
        for _ in range(_BAD_TASKS_MAX):
            ordinal = await groups.next_ordinal(connection)
            dispatched = await groups.count_by_environment(connection)
            weights = {name: share.weight for name, share in self._environments.items()}
            share = self._environments[dispatch.choose_environment(weights, dispatched)]
            index = dispatched.get(share.name, 0)
            group_id = f"g{ordinal}"
            try:
                task, prompt = self._make_task(share, index)
            except EnvironmentFault as fault:
                problem = str(fault)
                await groups.insert_skipped(connection, group_id, ordinal, share.name, index, at)
                await events.record(
                    connection,
                    at=at,
                    actor="coordinator",
                    action="bad_task",
                    subject=f"{share.name}/{index}",
                    detail=problem,
                )
                continue
            seeds = (dispatch.sample_seed(self._secret, f"{group_id}-{i}") for i in range(self._scheduling.group_size))
            group = NewGroup(
                group_id=group_id,
                ordinal=ordinal,
                environment=share.name,
                task_index=index,
                prompt=task.prompt,
                prompt_token_ids=prompt,
                reference=task.reference,
                max_tokens=share.max_tokens,
                seeds=tuple(seeds),
                deadline=at + self._scheduling.group_deadline_s,
            )
            await groups.insert(connection, group, at)
            return
        raise OurFault(f"{_BAD_TASKS_MAX} tasks in a row could not be made, the last because {problem}")

    def _make_task(self, share: EnvironmentShare, index: int) -> tuple[Task, tuple[int, ...]]:
        """A task and its prompt's tokens. Raises EnvironmentFault, whatever the environment raised."""
        try:
            task = share.make_task(index)
            prompt = tuple(self._tokenize(task.prompt))
        except Exception as error:
            raise EnvironmentFault(f"task {index} of {share.name} raised {type(error).__name__}: {error}") from error
        if not 0 < len(prompt) <= self._max_prompt_tokens:
            raise EnvironmentFault(
                f"the prompt of task {index} of {share.name} has {len(prompt)} tokens; server.max_prompt_tokens admits "
                f"1 to {self._max_prompt_tokens}"
            )
        return task, prompt
