"""What the service answers by itself; calls through a real server are tested with the client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from coordinator.interceptors import caller
from coordinator.service import WorkerService, measurements
from protocol.errors import UserError
from protocol.rollout import EOS_LOGPROB
from protocol.signing import Identity
from protos.rollswarm.v1 import worker_pb2
from tests.stored_run import StoredRun, rejected
from tests.turns import make_sums

Begin = Callable[..., Awaitable[StoredRun]]


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


async def leased(run: StoredRun, worker: Identity) -> worker_pb2.Lease:
    token = caller.set(worker.key_id)
    try:
        asked = worker_pb2.AcquireLeasesRequest(max_leases=1)
        answer = await run.service(WorkerService).AcquireLeases(asked, None)  # type: ignore[arg-type]
    finally:
        caller.reset(token)
    return answer.leases[0]


async def test_a_lease_names_the_rules_of_its_turns(begin: Begin, alice: Identity) -> None:
    turns = make_sums()
    assert (await leased(await begin(turns=turns), alice)).turns == turns.rules.digest


async def test_a_lease_of_a_single_turn_is_what_it_was(run: StoredRun, alice: Identity) -> None:
    lease = await leased(run, alice)
    assert "turns" not in {field.name for field, _ in lease.ListFields()}


async def test_who_does_not_know_turns_is_told_to_update(begin: Begin, alice: Identity, run: StoredRun) -> None:
    old = worker_pb2.GetChallengeRequest(key_id=alice.key_id, protocol_min=1, protocol_max=1)
    assert (await run.service(WorkerService).GetChallenge(old, None)).challenge  # type: ignore[arg-type]
    of_turns = (await begin(turns=make_sums())).service(WorkerService)
    with pytest.raises(UserError, match="speaks protocol 1 to 1, this run 2 to 2: update rollswarm"):
        await of_turns.GetChallenge(old, None)  # type: ignore[arg-type]
