"""Optional OpenTelemetry traces: one per lease, of one rollout's life. Off unless the run file names where they go.

    rollout            the lease was granted                             serve (worker's listener)
    ├ submit           its submission came in, or was refused            serve
    ├ verify           a verdict was written                             verify
    └ train            the trainer reported that it stepped on it        serve (trainer's listener)

No context travels: a life takes minutes, crosses processes, and passes through strangers' hands. Trace and root span are named
by a hash of the lease id instead, so every process adds to the same trace without having been told of it, and samples the same.
This module is imported only where traces are asked for; OpenTelemetry is the extra `otel`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from hashlib import sha256
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags, set_span_in_context
from sqlalchemy import select

from coordinator.interceptors import Handler, UnaryInterceptor, caller
from coordinator.store import tables as t
from coordinator.store.database import Database
from protocol.errors import RollswarmError, WorkerFault
from protocol.rollout import Outcome, Verdict
from protocol.wire import rollout_id
from protos.rollswarm.v1 import worker_pb2

_LOOKED_UP = 500  # rollouts per query: databases bound the arguments of one
_flags = TraceFlags(TraceFlags.SAMPLED)


def trace_id(lease_id: str) -> int:
    """128 bits, never 0."""
    return int.from_bytes(sha256(b"rollswarm/trace\0" + lease_id.encode()).digest()[:16], "big") or 1


def root_span_id(lease_id: str) -> int:
    """64 bits, never 0."""
    return int.from_bytes(sha256(b"rollswarm/root\0" + lease_id.encode()).digest()[:8], "big") or 1


class _Ids(RandomIdGenerator):
    """Random, but for a root span that is being begun."""

    def __init__(self) -> None:
        self.lease_id: ContextVar[str | None] = ContextVar("lease_id", default=None)

    def generate_trace_id(self) -> int:
        lease_id = self.lease_id.get()
        return super().generate_trace_id() if lease_id is None else trace_id(lease_id)

    def generate_span_id(self) -> int:
        lease_id = self.lease_id.get()
        return super().generate_span_id() if lease_id is None else root_span_id(lease_id)


class Tracing:
    """Writes spans of rollouts' lives. Times are Unix seconds of this process's clock."""

    def __init__(self, processor: SpanProcessor, *, service: str, sample: float = 1.0) -> None:
        self._ids = _Ids()
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service}),
            sampler=ParentBased(TraceIdRatioBased(sample)),
            id_generator=self._ids,
        )
        self._sample = TraceIdRatioBased(sample)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("rollswarm")

    @classmethod
    def to(cls, endpoint: str, *, service: str, sample: float) -> Tracing:
        """Send to an OTLP collector over HTTP (`http://host:4318/v1/traces`)."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)), service=service, sample=sample)

    def close(self) -> None:
        """Send what waits."""
        self._provider.shutdown()

    def leased(self, lease_id: str, begun: float, **about: Any) -> None:
        """The root: from when it was asked for until it was granted."""
        token = self._ids.lease_id.set(lease_id)
        try:
            span = self._tracer.start_span("rollout", start_time=_ns(begun), attributes=_attributes(lease_id, about))
        finally:
            self._ids.lease_id.reset(token)
        span.end()

    def step(self, name: str, lease_id: str, begun: float, problem: str = "", **about: Any) -> None:
        """A child of the root, which ends now. `problem`: why it failed, if it did."""
        if self._sample.should_sample(None, trace_id(lease_id), name).decision.is_sampled():
            known = SpanContext(trace_id(lease_id), root_span_id(lease_id), is_remote=True, trace_flags=_flags)
            parent = set_span_in_context(NonRecordingSpan(known))
            span = self._tracer.start_span(name, parent, start_time=_ns(begun), attributes=_attributes(lease_id, about))
            if problem:
                span.set_status(Status(StatusCode.ERROR, problem))
            span.end()

    def verified(self, lease_id: str, rollout: str, worker_id: str, begun: float, verdict: Verdict) -> None:
        """A verdict was written."""
        problem = "" if verdict.outcome is Outcome.ACCEPTED else str(verdict.reason or verdict.outcome)
        self.step(
            "verify", lease_id, begun, problem, rollout_id=rollout, worker_id=worker_id, outcome=str(verdict.outcome)
        )


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _attributes(lease_id: str, about: Mapping[str, Any]) -> dict[str, Any]:
    named = {f"rollswarm.{name}": value for name, value in about.items()}
    return {"rollswarm.lease_id": lease_id, **named}


class TraceInterceptor(UnaryInterceptor):
    """Looks at the calls that rollouts' lives are made of. The innermost: it sees messages, and the caller is known."""

    def __init__(self, tracing: Tracing, db: Database) -> None:
        super().__init__()
        self._tracing = tracing
        self._db = db

    async def call(self, method: str, behaviour: Handler, request: Any, context: grpc.aio.ServicerContext) -> Any:
        begun = time.time()
        name = method.rpartition("/")[2]
        if name == "SubmitRollout":
            return await self._submit(behaviour, request, context, begun)
        answer = await behaviour(request, context)
        if name == "AcquireLeases":
            for lease in answer.leases:
                self._tracing.leased(lease.lease_id, begun, sample_id=lease.sample_id, worker_id=caller.get())
        elif name == "ReportStep":
            await self._trained(request, begun)
        return answer

    async def _submit(self, behaviour: Handler, request: Any, context: grpc.aio.ServicerContext, begun: float) -> Any:
        problem = ""
        try:
            return await behaviour(request, context)
        except RollswarmError as error:
            problem = str(error.reason) if isinstance(error, WorkerFault) else type(error).__name__
            raise
        finally:
            lease_id = _lease_of(request.rollout.payload)
            if lease_id:
                about = {"rollout_id": rollout_id(request.rollout.payload), "worker_id": caller.get()}
                self._tracing.step("submit", lease_id, begun, problem, **about)

    async def _trained(self, request: Any, begun: float) -> None:
        ids = list(request.trained_rollout_ids)
        for first in range(0, len(ids), _LOOKED_UP):
            for row in await self._lives(ids[first : first + _LOOKED_UP]):
                about = {"rollout_id": row.rollout_id, "worker_id": row.worker_id, "batch": request.batch}
                self._tracing.step("train", row.lease_id, begun, **about)

    async def _lives(self, ids: Sequence[str]) -> Iterable[Any]:
        wanted = select(t.rollouts.c.rollout_id, t.rollouts.c.lease_id, t.rollouts.c.worker_id)
        async with self._db.read() as connection:
            return list(await connection.execute(wanted.where(t.rollouts.c.rollout_id.in_(ids))))


def _lease_of(payload: bytes) -> str:
    """The lease that a submission names; "" if it is none."""
    try:
        return worker_pb2.RolloutPayload.FromString(payload).lease_id[:64]
    except DecodeError:
        return ""
