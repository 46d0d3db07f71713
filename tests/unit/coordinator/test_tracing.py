"""One rollout's life is one trace, written by processes that tell one another nothing; and nothing is loaded unasked."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from coordinator import tokens
from coordinator.config import TracingSection, start_tracing
from coordinator.grpc_server import serve_trainer, serve_workers
from coordinator.service import TrainerService, WorkerService
from coordinator.store import database
from coordinator.store import tables as t
from coordinator.tracing import TraceInterceptor, Tracing, root_span_id, trace_id
from protocol.rollout import RejectionReason
from protocol.signing import Identity
from protocol.wire import envelope_to_wire
from protos.rollswarm.v1 import trainer_pb2, trainer_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.factories import RUN_ID, SECRET, TEMPERATURE
from tests.stored_run import StoredRun, accepted, rejected

TRAINER_TOKEN = "trainer-token"
Call = Callable[[str, Any], Awaitable[Any]]


@dataclass
class Traced:
    """Both listeners with tracing, and what was written."""

    exporter: InMemorySpanExporter
    tracing: Tracing
    worker: Call
    trainer: Call

    def spans(self) -> dict[str, ReadableSpan]:
        """By name; each happened once."""
        found = {span.name: span for span in self.exporter.get_finished_spans()}
        assert len(found) == len(self.exporter.get_finished_spans())
        return found


@pytest_asyncio.fixture
async def traced(run: StoredRun, alice: Identity) -> AsyncIterator[Traced]:
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter), service="test")
    interceptor = TraceInterceptor(tracing, run.db)
    service = run.service(WorkerService)
    feeding = TrainerService(run.feeding, run_id=RUN_ID, temperature=TEMPERATURE, scheduling=run.scheduling)
    where: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "tracing": interceptor}
    public = await serve_workers(service, secret=SECRET, max_payload_bytes=1 << 20, **where)
    private = await serve_trainer(feeding, token=TRAINER_TOKEN, **where)
    async with run.db.read() as connection:
        token = tokens.make_token(SECRET, alice.key_id, await database.now(connection))
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{each.port}") for each in (public, private)]
    workers, trainers = worker_pb2_grpc.WorkerServiceStub(channels[0]), trainer_pb2_grpc.TrainerServiceStub(channels[1])

    async def worker(name: str, request: Any) -> Any:
        return await getattr(workers, name)(request, metadata=(("authorization", f"Bearer {token}"),), timeout=60)

    async def trainer(name: str, request: Any) -> Any:
        metadata = (("authorization", f"Bearer {TRAINER_TOKEN}"),)
        return await getattr(trainers, name)(request, metadata=metadata, timeout=60)

    yield Traced(exporter, tracing, worker, trainer)
    for channel in channels:
        await channel.close()
    await public.stop(0)
    await private.stop(0)
    tracing.close()


async def test_a_life_is_one_trace(traced: Traced, run: StoredRun, alice: Identity) -> None:
    leased = (await traced.worker("AcquireLeases", worker_pb2.AcquireLeasesRequest(max_leases=1))).leases[0]
    lease = next(row for row in await run.rows(t.leases) if row.lease_id == leased.lease_id)
    envelope = run.envelope(alice, lease)
    await traced.worker("SubmitRollout", worker_pb2.SubmitRolloutRequest(rollout=envelope_to_wire(envelope)))
    (pending,) = await run.claim()
    traced.tracing.verified(lease.lease_id, pending.rollout_id, alice.key_id, 1.0, accepted(pending))
    report = trainer_pb2.ReportStepRequest(batch=3, trained_rollout_ids=[pending.rollout_id, "sha256:unknown"])
    await traced.trainer("ReportStep", report)

    spans = traced.spans()
    assert set(spans) == {"rollout", "submit", "verify", "train"}
    for name, span in spans.items():
        context = span.get_span_context()
        assert context is not None and span.attributes is not None
        assert context.trace_id == trace_id(lease.lease_id)
        assert span.attributes["rollswarm.lease_id"] == lease.lease_id
        assert span.attributes["rollswarm.worker_id"] == alice.key_id
        if name == "rollout":
            assert (span.parent, context.span_id) == (None, root_span_id(lease.lease_id))
            assert span.attributes["rollswarm.sample_id"] == lease.sample_id
        else:
            assert span.parent is not None and span.parent.span_id == root_span_id(lease.lease_id)
            assert span.attributes["rollswarm.rollout_id"] == pending.rollout_id
            assert span.status.is_ok or span.status.is_unset
    assert spans["train"].attributes is not None and spans["train"].attributes["rollswarm.batch"] == 3


async def test_what_was_refused_or_rejected_says_why(
    traced: Traced, run: StoredRun, alice: Identity, bob: Identity
) -> None:
    lease = await run.lease_one(alice)
    envelope = run.envelope(bob, lease)
    with pytest.raises(grpc.aio.AioRpcError):
        await traced.worker("SubmitRollout", worker_pb2.SubmitRolloutRequest(rollout=envelope_to_wire(envelope)))
    traced.tracing.verified(lease.lease_id, "sha256:x", alice.key_id, 1.0, rejected(RejectionReason.PROOF))
    spans = traced.spans()
    assert (spans["submit"].status.description, spans["verify"].status.description) == ("signature", "proof")
    assert not spans["submit"].status.is_ok and not spans["verify"].status.is_ok


async def test_every_process_samples_the_same_lives() -> None:
    seen = []
    for _ in range(2):
        exporter = InMemorySpanExporter()
        tracing = Tracing(SimpleSpanProcessor(exporter), service="test", sample=0.5)
        for number in range(200):
            tracing.leased(f"lease-{number}", 1.0)
            tracing.step("submit", f"lease-{number}", 1.0)
        names = [(span.name, (span.attributes or {})["rollswarm.lease_id"]) for span in exporter.get_finished_spans()]
        seen.append(names)
        tracing.close()
    assert seen[0] == seen[1]
    assert {lease for name, lease in seen[0] if name == "rollout"} == {
        lease for name, lease in seen[0] if name == "submit"
    }
    assert 60 < len(seen[0]) / 2 < 140


def test_without_an_endpoint_nothing_is_loaded(tmp_path: Path) -> None:
    assert start_tracing(TracingSection(), "test") is None
    code = "import sys, coordinator.serve, coordinator.verification.process; assert 'opentelemetry' not in sys.modules"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
