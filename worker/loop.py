"""The worker's loops, and what each consumes, produces, waits for, and who unblocks it.

    leasing     consumes room in the engine        produces leases, one generation task each
                waits for the coordinator (long poll), a finished task, or an outbox that has emptied
    generation  consumes a lease                   produces a signed envelope in the outbox
                waits for weights ≥ the lease's min_version, then for the engine
    renewing    consumes progress of all tasks     produces later deadlines, or aborts of what can't be accepted any more
    submitting  consumes the outbox                produces receipts; what has none stays on disk             (handing_in.py)
    weights     consumes new versions              produces swaps, in flight                                  (weights.py)
    standing    consumes the coordinator's view    produces numbers for the console; ends a banned worker     (standing.py)

A lease ends in exactly one way: its rollout is in the outbox, it was given back, or the coordinator ended it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from coordinator.client import LeasedSample, WorkerClient
from protocol.declaration import BF16
from protocol.errors import OurFault, RollswarmError
from protocol.lease import Commitment
from protocol.rollout import Rollout, token_digest
from protocol.signing import ROLLOUT, Identity
from protocol.terms import RunTerms
from protocol.turns import Turns
from protocol.wire import rollout_to_payload
from worker.engine import Engine, Generation, GenerationRequest, Progress, Weights
from worker.handing_in import HandingIn
from worker.outbox import Outbox
from worker.standing import Standing
from worker.status import Status
from worker.turns import generate_turns, load_turns, segments_of
from worker.weights import WeightsFollower

log = logging.getLogger(__name__)

_ACQUIRE_WAIT_S = 10.0


@dataclass(slots=True)
class _Held:
    """A lease in our hands, and how far its generation is."""

    lease: LeasedSample
    token_ids: tuple[int, ...] = ()
    version: int = 0
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _State:
    weights: Weights | None = None
    failure: OurFault | None = None
    held: dict[str, _Held] = field(default_factory=dict)


class Worker:
    """Runs until `stop` is called, the key is banned, or the engine dies."""

    def __init__(
        self,
        terms: RunTerms,
        *,
        identity: Identity,
        client: WorkerClient,
        engine: Engine,
        follower: WeightsFollower,
        outbox: Outbox,
        status: Status,
        concurrency: int,
        drain_s: float = 30.0,
        precision: str = BF16,
    ) -> None:
        self._precision = precision
        self._terms = terms
        self._identity = identity
        self._client = client
        self._engine = engine
        self._follower = follower
        self._status = status
        self._concurrency = concurrency
        self._drain_s = drain_s
        self._state = _State()
        self._turns: dict[str, Turns] = {}
        self._stop = asyncio.Event()
        self._changed = asyncio.Condition()  # a task ended, or other weights are loaded
        self._handing_in = HandingIn(client, outbox, status, key_id=identity.key_id, on_round=self._notify)
        self._standing = Standing(client, outbox, status)

    def stop(self) -> None:
        """Finish what is begun, give back what can't be, and end."""
        self._stop.set()

    async def run(self) -> None:
        """Work. Raises UserError if the key is banned or the run's tools don't work here, OurFault if the engine died."""
        self._status.phase = "registering"
        await self._client.register()
        if self._client.notice:
            log.warning("%s", self._client.notice, extra={"action": "notice"})
        await self._standing.ask()
        self._status.phase = "fetching weights"
        weights = await self._unless_stopped(self._follower.first())
        if weights is None:
            return
        self._turns = await asyncio.to_thread(load_turns, self._terms, weights.path)
        self._status.phase = "loading the engine"
        await self._engine.start(weights)
        try:
            await self._loaded(weights)
            self._status.phase = "working"
            await self._work(weights)
        finally:
            await self._engine.close()
        if self._state.failure is not None:
            raise self._state.failure

    async def _unless_stopped(self, work: Coroutine[Any, Any, Weights]) -> Weights | None:
        """The work's result, or None if `stop` came first."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            return task.result()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return None

    async def _work(self, weights: Weights) -> None:
        loops = [
            asyncio.create_task(loop, name=name)
            for name, loop in (
                ("leasing", self._leasing()),
                ("renewing", self._renewing()),
                ("submitting", self._handing_in.follow()),
                ("weights", self._follower.follow(weights, self._swap)),
                ("standing", self._standing.follow()),
            )
        ]
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            done, _ = await asyncio.wait({stop, *loops}, return_when=asyncio.FIRST_COMPLETED)
            failed = next((task for task in done if task is not stop and task.exception()), None)
            if failed is None:
                await self._drain(leasing=loops[0])
        finally:
            stop.cancel()
            for task in loops:
                task.cancel()
            await asyncio.gather(stop, *loops, return_exceptions=True)
            await self._give_back_all()
        if failed is not None:
            error = failed.exception()
            assert error is not None
            raise error

    async def _leasing(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(self._has_room)
            room = self._concurrency - len(self._state.held)
            version = self._state.weights.version if self._state.weights else 0
            leases, _, reason = await self._client.acquire(room, version, _ACQUIRE_WAIT_S)
            self._status.waiting_for = reason
            for lease in leases:
                held = _Held(lease)
                self._state.held[lease.lease_id] = held
                held.task = asyncio.create_task(self._generate(held), name=f"lease {lease.lease_id}")
            self._status.in_flight = len(self._state.held)

    def _has_room(self) -> bool:
        """Nothing more is leased than can be generated, nor while what is generated can't be handed in: its leases run."""
        return len(self._state.held) < self._concurrency and self._status.outbox < self._concurrency

    async def _generate(self, held: _Held) -> None:
        """Generate one sample and put it into the outbox; always lets go of the lease."""
        lease = held.lease
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._version() >= lease.min_version)
            generation = await self._run_engine(held)
            await self._handing_in.post(self._sign(lease, generation))
            self._status.generated += 1
        except asyncio.CancelledError:
            self._status.aborted += 1
            raise
        except RollswarmError as error:
            log.warning("a sample failed: %s", error, extra={"action": "generate_error", "lease_id": lease.lease_id})
            await self._give_back([lease.lease_id], "engine")
            if isinstance(error, OurFault):
                self._stop_with(error)
        except Exception:
            log.exception("a sample failed", extra={"action": "generate_error", "lease_id": lease.lease_id})
            await self._give_back([lease.lease_id], "engine")
        finally:
            self._state.held.pop(lease.lease_id, None)
            self._status.in_flight = len(self._state.held)
            await self._notify()

    async def _run_engine(self, held: _Held) -> Generation:
        lease = held.lease
        request = GenerationRequest(lease.lease_id, lease.prompt_token_ids, lease.sampling, lease.seed)
        turns = self._turns_of(lease)
        stream = self._engine.generate(request) if turns is None else generate_turns(self._engine, request, turns)
        try:
            async for event in stream:
                if isinstance(event, Generation):
                    self._status.count_tokens(len(event.token_ids) - len(held.token_ids))
                    return event
                self._progress(held, event)
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
        raise OurFault("the engine ended a request without a result")

    def _turns_of(self, lease: LeasedSample) -> Turns | None:
        """How the lease's task takes its turns, None if it has one."""
        if not lease.turns:
            return None
        if lease.turns not in self._turns:
            raise OurFault("the run's turns are others than when this worker joined: start it again")
        return self._turns[lease.turns]

    def _progress(self, held: _Held, event: Progress) -> None:
        self._status.count_tokens(len(event.token_ids) - len(held.token_ids))
        held.token_ids = event.token_ids
        held.version = self._version()

    def _sign(self, lease: LeasedSample, generation: Generation) -> Any:
        rollout = Rollout(
            run_id=self._terms.run_id,
            lease_id=lease.lease_id,
            sample_id=lease.sample_id,
            segments=segments_of(generation, lease.sampling, self._turns_of(lease)),
            logprobs=generation.logprobs,
            spans=generation.spans,
            proofs=generation.proofs,
            stop_reason=generation.stop_reason,
            precision=self._precision,
            turns=lease.turns,
        )
        return self._identity.sign(ROLLOUT, rollout_to_payload(rollout))

    async def _renewing(self) -> None:
        while True:
            await asyncio.sleep(max(self._terms.lease_term_s / 4, 0.01))
            progress = {
                lease_id: Commitment(
                    len(held.token_ids), token_digest(held.token_ids) if held.token_ids else b"", held.version
                )
                for lease_id, held in self._state.held.items()
            }
            if progress:
                await self._renew(progress)

    async def _renew(self, progress: dict[str, Commitment]) -> None:
        renewed, _ = await self._client.renew(progress)
        for lease_id, (_, problem) in renewed.items():
            held = self._state.held.get(lease_id)
            if problem and held is not None and held.task is not None:
                log.info("stopped a sample: %s", problem, extra={"action": "abort", "lease_id": lease_id})
                held.task.cancel()

    async def _swap(self, weights: Weights) -> None:
        report = await self._engine.swap(weights)
        self._status.swaps += 1
        self._status.last_swap_s = report.pause_seconds
        log.info(
            "swapped to version %d in %.2f s with %d requests in flight",
            weights.version,
            report.pause_seconds,
            report.requests_in_flight,
            extra={"action": "swap", "version": weights.version},
        )
        await self._loaded(weights)

    async def _loaded(self, weights: Weights) -> None:
        self._state.weights = weights
        self._status.policy_version = weights.version
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _version(self) -> int:
        return -1 if self._state.weights is None else self._state.weights.version

    def _stop_with(self, error: OurFault) -> None:
        log.error("the engine failed: %s", error, extra={"action": "engine_error"})
        self._state.failure = error
        self._stop.set()

    async def _drain(self, leasing: asyncio.Task[None]) -> None:
        """Stop leasing, let what is begun finish within `drain_s`, and hand it in."""
        self._status.phase = "finishing"
        leasing.cancel()
        await asyncio.gather(leasing, return_exceptions=True)
        tasks = {held.task for held in self._state.held.values() if held.task is not None}
        if tasks:
            await asyncio.wait(tasks, timeout=self._drain_s)
        await self._handing_in.empty()

    async def _give_back_all(self) -> None:
        held = list(self._state.held.values())
        for item in held:
            if item.task is not None:
                item.task.cancel()
        await asyncio.gather(*(item.task for item in held if item.task), return_exceptions=True)
        await self._give_back([item.lease.lease_id for item in held], "shutdown")

    async def _give_back(self, lease_ids: list[str], reason: str) -> None:
        """Best effort: what can't be given back expires by itself."""
        if not lease_ids:
            return
        try:
            await self._client.give_back(lease_ids, reason, patience_s=3.0)
        except RollswarmError as error:
            log.warning("could not give leases back (%s); they expire by themselves", error, extra={"action": "return"})
