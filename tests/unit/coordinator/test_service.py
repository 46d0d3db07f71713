"""What the service answers by itself; calls through a real server are tested with the client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coordinator.interceptors import caller
from coordinator.service import WorkerService, measurements
from protocol.rollout import EOS_LOGPROB
from protocol.signing import Identity
from protos.rollswarm.v1 import worker_pb2
from tests.stored_run import StoredRun, rejected


def test_measurements_say_what_came_and_what_is_admitted() -> None:
    metrics = {"proof_mantissa_mean": 7.0, "seed_mismatches": 3.0, EOS_LOGPROB: -25.0}
    admitted = {"proof_mantissa_mean": 3.6, EOS_LOGPROB: -20.7, "seed_margin_max": 0.6}
    found = [(each.name, each.value, each.admitted, each.at_least) for each in measurements(metrics, admitted)]
    assert found == [(EOS_LOGPROB, -25.0, -20.7, True), ("proof_mantissa_mean", 7.0, 3.6, False)]


async def test_a_rejected_worker_is_told_what_was_expected_and_what_came(run: StoredRun, alice: Identity) -> None:
    await run.work(alice, 1)
    numbers: dict[str, Any] = {"metrics": {"logprob_gap_max": 1.5}, "admitted": {"logprob_gap_max": 0.8}}
    await run.judge(replace(rejected(), **numbers))
    service = run.service(WorkerService)
    token = caller.set(alice.key_id)
    try:
        answer = await service.GetStanding(worker_pb2.GetStandingRequest(max_verdicts=8), None)  # type: ignore[arg-type]
    finally:
        caller.reset(token)
    (notice,) = answer.verdicts
    assert (notice.outcome, notice.reason, notice.detail) == ("rejected", "proof", "another model")
    (measured,) = notice.measurements
    assert (measured.name, measured.value, measured.admitted) == ("logprob_gap_max", 1.5, 0.8)
