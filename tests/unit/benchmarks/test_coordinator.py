"""What the coordinator's benchmark computes, and that what its workers send is a valid submission."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.coordinator import clients, fleet, load, manifests, watch
from benchmarks.coordinator.setting import EOS, HIDDEN_SIZE, VOCABULARY, Shape, worker_identity, write_run
from coordinator.config import load_run_file
from coordinator.verification.checks.base import Claim
from coordinator.verification.checks.form import FormCheck
from demo.presets import Ports
from protocol.rollout import SamplingParams
from protocol.signing import ROLLOUT, SignedEnvelope, open_envelope
from protocol.wire import rollout_from_payload
from protos.rollswarm.v1 import worker_pb2


class Recorder:
    """Stands for a stub: keeps what was submitted."""

    def __init__(self) -> None:
        self.submitted: list[worker_pb2.SubmitRolloutRequest] = []

    async def SubmitRollout(  # noqa: N802
        self, request: worker_pb2.SubmitRolloutRequest, **_: object
    ) -> worker_pb2.SubmitRolloutResponse:
        self.submitted.append(request)
        return worker_pb2.SubmitRolloutResponse()


async def test_a_simulated_worker_submits_what_a_coordinator_takes() -> None:
    swarm = load.Swarm(["127.0.0.1:1"], "run-1", first=7, count=1, leases=8, tokens=70)
    (worker,) = swarm.workers
    recorder = Recorder()
    worker.stub, worker.version = recorder, 5  # type: ignore[assignment]
    tally = load.Tally()
    await swarm._submit(worker, worker_pb2.Lease(lease_id="l", sample_id="g1-2", min_version=3), 0.0, tally)
    await swarm.close()
    (request,) = recorder.submitted
    envelope = SignedEnvelope(request.rollout.payload, request.rollout.key_id, request.rollout.signature)
    rollout = rollout_from_payload(open_envelope(envelope, ROLLOUT, pinned=(worker_identity(7).key_id,)))
    assert (rollout.run_id, rollout.lease_id, rollout.sample_id) == ("run-1", "l", "g1-2")
    assert [(span.version, span.manifest_digest) for span in rollout.spans] == [(5, manifests.digest("run-1", 5))]
    sampling = SamplingParams(1.0, 70, (EOS,))
    assert FormCheck()(Claim(rollout, (), sampling, 0, VOCABULARY, HIDDEN_SIZE)).passed
    assert len(tally.done) == 1 and not tally.failures


def test_what_several_processes_saw_is_put_together() -> None:
    first = load.Tally(lease_s=[0.1], submit_s=[0.010, 0.030], done=[10.0, 11.5, 13.9], empty=1)
    second = load.Tally(submit_s=[0.020], done=[10.5, 12.0, 14.5])
    second.failures["UNAVAILABLE"] += 2
    seen = fleet._together([clients.told(first), clients.told(second)], seconds=4.0)
    assert seen.rollouts_per_s == pytest.approx(3 / 3.0), "from one second after the first receipt to the end"
    assert seen.submit_ms[0] == pytest.approx(20.0)
    assert (seen.receipts, seen.empty, seen.failures) == (6, 1, {"UNAVAILABLE": 2})


def test_latencies_of_a_long_phase_are_told_in_bounded_space() -> None:
    told = clients.told(load.Tally(submit_s=[number / 100_000 for number in range(100_000)]))
    assert len(told["submit_s"]) == clients._KEPT
    assert fleet._percentiles(told["submit_s"])[1] == pytest.approx(990.0, rel=0.01)


async def test_the_run_file_is_one_that_a_coordinator_reads(tmp_path: Path) -> None:
    path = write_run(tmp_path, "coordinator", "sqlite+aiosqlite:///run.db", Shape(), Ports.free())
    run_file = await asyncio.to_thread(load_run_file, path)
    shape = Shape()
    assert run_file.max_tokens == shape.tokens
    capacity = (shape.max_staleness + 1) * shape.groups_per_batch * shape.group_size
    assert capacity > shape.workers * shape.leases, "every worker finds leases"


def test_sizes_of_folders_count_what_is_in_them(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"123")
    (tmp_path / "c").write_bytes(b"45")
    assert watch.size([tmp_path / "a", tmp_path / "c", tmp_path / "gone"]) == 5
