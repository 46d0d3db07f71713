"""Simulated workers: real gRPC calls, real signatures, rollouts of valid form whose tokens mean nothing.

Closed loop: every worker leases, submits one rollout after the other, and leases again, as fast as it is answered.
Open loop: submissions arrive at a given rate whatever the answers do, and their latency counts from when they should
have been sent; a worker leases again when its last lease was handed in.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from benchmarks.coordinator.manifests import digest
from benchmarks.coordinator.setting import EOS, HIDDEN_SIZE, VOCABULARY, worker_identity
from protocol import toploc
from protocol.declaration import Declaration
from protocol.rollout import Rollout, Segment, StopReason, VersionSpan
from protocol.signing import CHALLENGE, DECLARATION, ROLLOUT, Identity
from protocol.terms import PROTOCOL_MAX, PROTOCOL_MIN
from protocol.wire import declaration_to_payload, envelope_to_wire, rollout_to_payload
from protos.rollswarm.v1 import worker_pb2, worker_pb2_grpc

_DECLARED = Declaration(hardware="simulated CPU, none 1")
_TEMPLATES = 16
_WORKERS_PER_CHANNEL = 64  # a connection has at most 128 calls under way
_CALL_S = 60.0
_LEASE_WAIT_MS = 2000
_REGISTERING = 32  # at once
_SETTLE_S = 5.0  # before an open phase is counted, at least


@dataclass
class Tally:
    """What one phase saw. Times in seconds; `done`: when receipts came, by the monotonic clock."""

    lease_s: list[float] = field(default_factory=list)
    submit_s: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    empty: int = 0  # calls for leases that found none
    failures: Counter[str] = field(default_factory=Counter)


class Worker:
    """One simulated worker and the leases that it holds."""

    def __init__(self, number: int, stub: worker_pb2_grpc.WorkerServiceStub) -> None:
        self.identity: Identity = worker_identity(number)
        self.stub = stub
        self.held: deque[worker_pb2.Lease] = deque()
        self.version = 0
        self.metadata: tuple[tuple[str, str], ...] = ()
        self.acquiring = False

    async def register(self) -> None:
        """Prove the key and keep the token."""
        request = worker_pb2.GetChallengeRequest(
            key_id=self.identity.key_id, protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX
        )
        challenge = (await self.stub.GetChallenge(request, timeout=_CALL_S)).challenge
        declared = self.identity.sign(DECLARATION, declaration_to_payload(_DECLARED, challenge))
        answer = await self.stub.Register(
            worker_pb2.RegisterRequest(
                challenge=envelope_to_wire(self.identity.sign(CHALLENGE, challenge)),
                declaration=envelope_to_wire(declared),
                name="simulated",
                hardware="none",
                software="benchmark",
            ),
            timeout=_CALL_S,
        )
        self.metadata = (("authorization", f"Bearer {answer.token}"),)


class Swarm:
    """Workers `first` … `first + count` of this process, over a few channels to the endpoints. `run_id`: "" for an echo."""

    def __init__(self, endpoints: Sequence[str], run_id: str, first: int, count: int, leases: int, tokens: int) -> None:
        options = (("grpc.use_local_subchannel_pool", 1),)
        self._channels = [
            grpc.aio.insecure_channel(endpoints[number % len(endpoints)], options=options)
            for number in range(max(len(endpoints), -(-count // _WORKERS_PER_CHANNEL)))
        ]
        stubs = [worker_pb2_grpc.WorkerServiceStub(channel) for channel in self._channels]
        self.workers = [Worker(first + number, stubs[number % len(stubs)]) for number in range(count)]
        self._run_id = run_id
        self._leases = leases
        self._templates = [_template(number, run_id, tokens) for number in range(_TEMPLATES)]
        self._random = random.Random(first)

    async def register(self) -> None:
        """Register every worker, a few at a time."""
        slots = asyncio.Semaphore(_REGISTERING)

        async def one(worker: Worker) -> None:
            async with slots:
                await worker.register()

        if self._run_id:
            await asyncio.gather(*(one(worker) for worker in self.workers))

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def closed_loop(self, seconds: float) -> Tally:
        """Every worker as fast as it is answered."""
        tally, end = Tally(), time.monotonic() + seconds

        async def work(worker: Worker) -> None:
            while time.monotonic() < end:
                if not worker.held:
                    await self._acquire(worker, time.monotonic(), tally)
                while worker.held and time.monotonic() < end:
                    await self._submit(worker, worker.held.popleft(), time.monotonic(), tally)

        await asyncio.gather(*map(work, self.workers))
        return tally

    async def open_loop(self, seconds: float, rate: float) -> Tally:
        """Submissions at `rate` per second, at random moments. A time before that is not counted, in which they come as often
        and every worker hands in what it has leases for: what a phase before left over is another load."""
        tally, warming, tasks = Tally(), Tally(), set[asyncio.Task[None]]()
        ready: asyncio.Queue[Worker] = asyncio.Queue()

        def start(action: Coroutine[Any, Any, None]) -> None:
            task = asyncio.create_task(action)
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        async def refill(worker: Worker, due: float, seen: Tally) -> None:
            while not worker.held and not ended.is_set():
                await self._acquire(worker, due, seen)
                due = time.monotonic()
            for _ in worker.held:
                ready.put_nowait(worker)

        async def submit(due: float, seen: Tally) -> None:
            worker = await ready.get()
            lease = worker.held.popleft()
            if not worker.held:
                start(refill(worker, time.monotonic(), seen))
            await self._submit(worker, lease, due, seen)

        ended = asyncio.Event()
        order = list(self.workers)
        self._random.shuffle(order)
        await asyncio.gather(*(refill(worker, time.monotonic(), warming) for worker in order))
        due = time.monotonic()
        counted = due + max(_SETTLE_S, len(self.workers) * self._leases / rate)
        end = counted + seconds
        while due < end:
            due += self._random.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            start(submit(due, tally if due >= counted else warming))
        ended.set()
        _, late = await asyncio.wait(tasks, timeout=_CALL_S)
        for task in late:
            task.cancel()
            tally.failures["late"] += 1
        return tally

    async def _acquire(self, worker: Worker, due: float, tally: Tally) -> None:
        request = worker_pb2.AcquireLeasesRequest(
            max_leases=self._leases, policy_version=worker.version, wait_ms=_LEASE_WAIT_MS
        )
        answer = await self._call(worker, worker.stub.AcquireLeases, request, tally)
        if answer is None:
            return
        tally.lease_s.append(time.monotonic() - due)
        tally.empty += not answer.leases
        worker.held.extend(answer.leases)
        worker.version = answer.head_version

    async def _submit(self, worker: Worker, lease: worker_pb2.Lease, due: float, tally: Tally) -> None:
        envelope = worker.identity.sign(ROLLOUT, self._payload(worker, lease))
        request = worker_pb2.SubmitRolloutRequest(rollout=envelope_to_wire(envelope))
        answer = await self._call(worker, worker.stub.SubmitRollout, request, tally)
        if answer is None:
            return
        now = time.monotonic()
        tally.submit_s.append(now - due)
        tally.done.append(now)

    def _payload(self, worker: Worker, lease: worker_pb2.Lease) -> bytes:
        message = self._templates[self._random.randrange(_TEMPLATES)]
        message.lease_id, message.sample_id = lease.lease_id, lease.sample_id
        span = message.spans[0]
        span.version = max(worker.version, lease.min_version)
        span.manifest_digest = digest(self._run_id or "echo", span.version)
        return message.SerializeToString()

    async def _call(self, worker: Worker, method: Callable[..., Any], request: Any, tally: Tally) -> Any:
        """The answer, None for a call that failed, which is counted. A token that has expired is replaced."""
        for attempt in (0, 1):
            try:
                return await method(request, metadata=worker.metadata, timeout=_CALL_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAUTHENTICATED and not attempt:
                    await worker.register()
                    continue
                tally.failures[f"{error.code().name}: {error.details()}"[:120]] += 1
        return None


def _template(number: int, run_id: str, tokens: int) -> worker_pb2.RolloutPayload:
    """A rollout of valid form that ends with EOS; its lease, sample and version are filled in later."""
    draw = np.random.default_rng(number)
    token_ids = (*draw.integers(3, VOCABULARY, tokens - 1).tolist(), EOS)
    hidden = draw.integers(0x3E00, 0x4100, (tokens, HIDDEN_SIZE)).astype(np.uint16)
    rollout = Rollout(
        run_id=run_id or "echo",
        lease_id="0" * 32,
        sample_id="g0-0",
        segments=(Segment.by_model(token_ids),),
        logprobs=tuple(np.float32(-each).item() for each in draw.exponential(0.5, tokens)),
        spans=(VersionSpan(0, digest(run_id or "echo", 0), 0, tokens),),
        proofs=(toploc.build_proofs(hidden),),
        stop_reason=StopReason.EOS,
    )
    message = worker_pb2.RolloutPayload()
    message.ParseFromString(rollout_to_payload(rollout))
    return message
