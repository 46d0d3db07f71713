"""Executes the granting of leases to several workers in one transaction: facts by few questions, decisions by `dispatch`
and `pace`, then everything written at once. Who comes later in the transaction sees what those before it got.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator import dispatch, pace
from coordinator.choosing import Waiting
from coordinator.grouping import GroupMaker
from coordinator.hardware import HardwareRules, HardwareState, state_of
from coordinator.pace import OutLease, Pace
from coordinator.scheduling import Freshness, Scheduling
from coordinator.store import events, hardware, leases, rollouts, run, workers
from coordinator.store import pace as pace_store
from coordinator.store.groups import LeasableSample
from coordinator.store.leases import NewLease
from coordinator.store.workers import Known
from protocol import lease as lease_rules
from protocol.errors import WorkerFault
from protocol.lease import Lease, LeaseState
from protocol.ledger import is_newcomer
from protocol.policy import capacity, oldest_admissible
from protocol.rollout import RejectionReason

_PACES = 65_536


@dataclass(frozen=True, slots=True)
class Request:
    """A worker wants up to `wanted` leases."""

    worker_id: str
    wanted: int


@dataclass(frozen=True, slots=True)
class Granted:
    """Leases with what each needs on the wire; `head` and `reason` go along."""

    leases: tuple[tuple[Lease, LeasableSample], ...]
    head: int
    reason: str
    now: float


@dataclass
class Load:
    """What is out, in samples, at a time; newcomers' leases by address. `elsewhere`: see workers.newcomers_at."""

    at: float
    leased: int
    unconsumed: int
    newcomers: Counter[str] | None = None  # None: nobody asked yet
    elsewhere: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What leasing goes by besides the run's numbers, at a time: how far leases may reach, decisions on kinds of hardware."""

    at: float
    horizon: float | None
    asked: frozenset[str]  # kinds of hardware
    decisions: dict[str, str | None]


@dataclass
class Facts:
    """What one transaction knows, kept up to date with what it grants."""

    at: float
    head: int
    load: Load
    known: dict[str, Known]
    live: Counter[str]
    horizon: float | None
    decisions: dict[str, str | None]
    tried: dict[str, int]  # leases that a class in shadow has used up
    # Asked once for all of the transaction's workers, if for any.
    paces: dict[str, Pace | None] | None = None
    active: list[str] | None = None  # two of the workers that were here of late, if there are two


@dataclass(frozen=True, slots=True)
class Plan:
    """What one worker shall get."""

    request: Request
    count: int
    trial: dispatch.Trial
    newcomer: bool
    group_samples: int | None
    pace: Pace | None


class Granting:
    """Decides and stores. Everything that it remembers between transactions is as old as `freshness` allows."""

    def __init__(
        self, scheduling: Scheduling, maker: GroupMaker, hardware_rules: HardwareRules, freshness: Freshness
    ) -> None:
        self.scheduling = scheduling
        self._maker = maker
        self._hardware_rules = hardware_rules
        self._freshness = freshness
        self._load: Load | None = None
        self._run_facts: RunFacts | None = None
        self._paces: OrderedDict[str, tuple[float, Pace | None]] = OrderedDict()
        self._looked_for_stragglers = 0.0

    async def grant(
        self, connection: AsyncConnection, requests: Sequence[Request], at: float
    ) -> list[Granted | WorkerFault]:
        """An answer to each request: leases, why there are none, or WorkerFault for who is banned or unknown."""
        known = await workers.known(connection, list({each.worker_id for each in requests}))
        faults = [_fault(known.get(each.worker_id)) for each in requests]
        head, paused = await run.head_and_paused(connection)
        if head is None:
            await self._note_seen(connection, list(known.values()), at)
            nothing = Granted((), 0, "no policy version is published yet", at)
            return [fault or nothing for fault in faults]
        facts = await self._facts(connection, known, head, at)
        answers: list[Granted | WorkerFault] = []
        plans: list[Plan | None] = []
        for request, fault in zip(requests, faults, strict=True):
            planned = fault or await self._plan(connection, request, facts, paused)
            if isinstance(planned, Plan):
                answers.append(Granted((), head, "", at))
                plans.append(planned)
            else:
                answers.append(planned if isinstance(planned, WorkerFault) else Granted((), head, planned.reason, at))
                plans.append(None)
        for number, granted in enumerate(await self._carry_out(connection, plans, facts)):
            if granted is not None:
                answers[number] = granted
        await self._note_seen(connection, list(known.values()), at)  # last: verdicts wait for whom it locks
        return answers

    async def has_room(self, connection: AsyncConnection) -> bool:
        """Whether anybody could get anything: cheap, for those who wait."""
        head, paused = await run.head_and_paused(connection)
        if paused or head is None:
            return False
        load = await self._count_load(connection, 0.0)
        scheduling = self.scheduling
        return load.leased + load.unconsumed < capacity(scheduling.max_staleness, scheduling.batch_samples)

    # Facts

    async def _facts(self, connection: AsyncConnection, known: dict[str, Known], head: int, at: float) -> Facts:
        of_run = await self._look_up_run(connection, {worker.declared.hardware for worker in known.values()}, at)
        return Facts(
            at=at,
            head=head,
            load=await self._count_load(connection, at),
            known=known,
            live=Counter(await leases.count_live_of_workers(connection, list(known))),
            horizon=of_run.horizon,
            decisions=of_run.decisions,
            tried={},
        )

    async def _look_up_run(self, connection: AsyncConnection, names: set[str], at: float) -> RunFacts:
        known = self._run_facts
        fresh = known is not None and known.at <= at < known.at + self._freshness.rules_s
        if known is None or not fresh or not names <= known.asked:
            names |= known.asked if known is not None and fresh else set()
            step_s = await pace_store.step_s(connection, at)
            horizon = pace.horizon_s(step_s, self.scheduling.max_staleness)
            decisions = await hardware.decisions(connection, names)
            known = self._run_facts = RunFacts(at, horizon, frozenset(names), decisions)
        return known

    async def _note_seen(self, connection: AsyncConnection, known: Sequence[Known], at: float) -> None:
        age = min(self._freshness.seen_s, self.scheduling.lease_term_s / 4)
        stale = [each.worker_id for each in known if each.seen_at <= at - age and not each.standing.banned]
        await workers.seen(connection, sorted(stale), at)

    async def _count_load(self, connection: AsyncConnection, at: float) -> Load:
        """`at`: 0 counts anew, whatever is remembered."""
        if self._load is None or not self._load.at <= at < self._load.at + self._freshness.load_s:
            leased = await leases.count_live(connection)
            self._load = Load(at, leased, await rollouts.count_unconsumed(connection))
        return self._load

    async def _newcomers(self, connection: AsyncConnection, load: Load, at: float) -> Counter[str]:
        if load.newcomers is None:
            probation, since = self.scheduling.probation_rollouts, at - self.scheduling.lease_term_s
            load.newcomers = Counter(await leases.count_live_of_newcomers(connection, probation))
            load.elsewhere = await workers.newcomers_at(connection, probation, since)
        return load.newcomers

    async def _pace(self, connection: AsyncConnection, worker_id: str, facts: Facts) -> Pace | None:
        if facts.paces is None:
            facts.paces = await self._measured(connection, list(facts.known), facts.at)
        return facts.paces[worker_id]

    async def _measured(
        self, connection: AsyncConnection, worker_ids: Sequence[str], at: float
    ) -> dict[str, Pace | None]:
        kept = {worker_id: self._paces[worker_id] for worker_id in worker_ids if worker_id in self._paces}
        fresh = {each: pace for each, (then, pace) in kept.items() if then <= at < then + self._freshness.pace_s}
        anew = await pace_store.of_workers(connection, [each for each in worker_ids if each not in fresh], at)
        for worker_id, measured in anew.items():
            self._paces[worker_id] = (at, measured)
            self._paces.move_to_end(worker_id)
        while len(self._paces) > _PACES:
            self._paces.popitem(last=False)
        return fresh | anew

    # Decisions

    async def _plan(
        self, connection: AsyncConnection, request: Request, facts: Facts, paused: bool
    ) -> Plan | dispatch.Grant:
        """What the worker gets, or the grant of nothing that says why."""
        scheduling, worker, load = self.scheduling, facts.known[request.worker_id], facts.load
        trial = await self._trial(connection, worker, facts)
        on_probation = is_newcomer(worker.standing, scheduling.probation_rollouts)
        newcomer = trial.shadow or on_probation
        leased = await self._newcomers(connection, load, facts.at) if newcomer else Counter[str]()
        granted = dispatch.grant(
            wanted=request.wanted,
            newcomer=newcomer,
            paused=paused,
            load=dispatch.Load(load.leased, load.unconsumed, leased.total()),
            max_staleness=scheduling.max_staleness,
            batch_samples=scheduling.batch_samples,
            newcomer_share=scheduling.newcomer_share,
        )
        live = facts.live[request.worker_id]
        if on_probation:
            most = self._of_address(load, worker.address)
            granted = dispatch.within_share(granted, leased[worker.address], most, "newcomers")
        if granted.count == 0:
            return granted
        measured = await self._pace(connection, request.worker_id, facts)
        if pace.too_slow(measured, facts.horizon):
            return dispatch.Grant(0, "too slow")
        granted = dispatch.within_share(granted, live, pace.most_leases(measured, facts.horizon), "speed")
        share = await self._share(connection, request.worker_id, facts)
        granted = dispatch.within_share(granted, live, share.leases)
        granted = dispatch.within_trial(granted, trial.room)
        if granted.count == 0:
            return granted
        self._book(facts, worker, granted.count, trial, newcomer)
        return Plan(request, granted.count, trial, newcomer, share.group_samples, measured)

    def _book(self, facts: Facts, worker: Known, count: int, trial: dispatch.Trial, newcomer: bool) -> None:
        """Let those who come later see what this worker gets; a negative count takes it back."""
        facts.load.leased += count
        facts.live[worker.worker_id] += count
        if newcomer and facts.load.newcomers is not None:
            facts.load.newcomers[worker.address] += count
        if trial.shadow and trial.hardware in facts.tried:
            facts.tried[trial.hardware] += count

    def _of_address(self, load: Load, address: str) -> int | None:
        """The most that newcomers of this address have together."""
        scheduling = self.scheduling
        return dispatch.newcomers_of_address(
            scheduling.newcomer_share,
            scheduling.newcomer_address_share,
            capacity(scheduling.max_staleness, scheduling.batch_samples),
            others_wait=load.elsewhere is not None and load.elsewhere != (address, address),
        )

    async def _trial(self, connection: AsyncConnection, worker: Known, facts: Facts) -> dispatch.Trial:
        """Whether the worker's hardware is taken at its word, and how much is left of trying it out."""
        rules, name = self._hardware_rules, worker.declared.hardware
        state = state_of(name, worker.declared.precision, facts.decisions.get(name), rules)
        if state is HardwareState.ADMITTED:
            return dispatch.Trial(name, False, None)
        if state is HardwareState.REFUSED:
            return dispatch.Trial(name, True, 0)
        if name not in facts.tried:
            facts.tried[name] = await hardware.count_used(connection, name)
        return dispatch.Trial(name, True, max(0, rules.shadow_rollouts - facts.tried[name]))

    async def _share(self, connection: AsyncConnection, worker_id: str, facts: Facts) -> dispatch.Share:
        """What this worker may have of each group, and of all leases."""
        scheduling = self.scheduling
        if scheduling.worker_share >= 1.0:
            return dispatch.EVERYTHING
        if facts.active is None:
            facts.active = await workers.two_active(connection, facts.at - scheduling.lease_term_s)
        return dispatch.share_of(
            scheduling.worker_share,
            others_active=any(each != worker_id for each in facts.active),
            group_size=scheduling.group_size,
            capacity=capacity(scheduling.max_staleness, scheduling.batch_samples),
        )

    # Deeds

    async def _carry_out(
        self, connection: AsyncConnection, plans: Sequence[Plan | None], facts: Facts
    ) -> list[Granted | None]:
        """Free stragglers, choose samples, store the leases; for each plan what came of it."""
        made = [plan for plan in plans if plan is not None]
        if not made:
            return [None] * len(plans)
        await self._free_stragglers(connection, made, facts.at)
        waiting = Waiting(connection, self._maker, self.scheduling, facts.at)
        await waiting.prepare(
            sorted({plan.request.worker_id for plan in made}),
            sum(plan.count for plan in made),
            shared=any(plan.group_samples is not None for plan in made),
        )
        new: list[NewLease] = []
        answers: list[Granted | None] = []
        min_version = oldest_admissible(facts.head, self.scheduling.max_staleness)
        for plan in plans:
            if plan is None:
                answers.append(None)
                continue
            worker_id = plan.request.worker_id
            chosen = await waiting.choose(worker_id, plan.count, plan.group_samples)
            pairs = tuple(
                (
                    Lease(
                        secrets.token_hex(16),
                        sample.sample_id,
                        worker_id,
                        min_version,
                        facts.at + self.scheduling.lease_term_s,
                    ),
                    sample,
                )
                for sample in chosen
            )
            new += [NewLease(lease, plan.trial.hardware, plan.trial.shadow) for lease, _ in pairs]
            answers.append(Granted(pairs, facts.head, "" if pairs else "draining", facts.at))
            self._book(facts, facts.known[worker_id], len(pairs) - plan.count, plan.trial, plan.newcomer)
        await leases.insert(connection, new, facts.at)
        return answers

    async def _free_stragglers(self, connection: AsyncConnection, plans: Sequence[Plan], at: float) -> None:
        """Revoke leases that hold up a group which one of these much faster workers can end; their samples wait, with the same
        seed.

        There is one live lease per sample, also here: the straggler is told at its next renewal, and loses nothing but work.
        """
        measured = [plan for plan in plans if plan.pace is not None]
        if not measured or at < self._looked_for_stragglers + self._freshness.stragglers_s:
            return
        self._looked_for_stragglers = at
        term = self.scheduling.lease_term_s
        out = await pace_store.stragglers(connection, at, term)
        for plan in measured:
            others = [each for each in out if each.worker_id != plan.request.worker_id]
            for each in pace.take_over(others, plan.pace, term, plan.count):
                await self._take_over(connection, each, at)
                out.remove(each)

    async def _take_over(self, connection: AsyncConnection, straggler: OutLease, at: float) -> None:
        lease = await leases.seize(connection, straggler.lease_id)
        if lease is None:
            return
        await leases.save_many(connection, [lease_rules.finish(lease, LeaseState.REVOKED)])
        detail = f"{straggler.committed} of at most {straggler.max_tokens} tokens after {straggler.age_s:.0f} s"
        await events.record(
            connection, at=at, actor="coordinator", action="take_over", subject=lease.sample_id, detail=detail
        )


def _fault(worker: Known | None) -> WorkerFault | None:
    if worker is None:
        return WorkerFault(RejectionReason.LEASE, "this key never registered")
    if worker.standing.banned:
        return WorkerFault(RejectionReason.LEASE, f"this key is banned: {worker.standing.ban_reason}")
    return None
