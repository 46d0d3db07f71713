"""The gRPC services: messages in, values to the room that does the work, messages out. No decisions here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import grpc
from sqlalchemy import select

from coordinator import tokens
from coordinator.clock import DatabaseClock
from coordinator.feeding import Feeding
from coordinator.intake import Intake
from coordinator.interceptors import caller, peer_address
from coordinator.leasing import Leasing
from coordinator.limits import address_group
from coordinator.line import Line
from coordinator.metrics import Metrics
from coordinator.registration import About, Joining
from coordinator.scheduling import Scheduling
from coordinator.store import rollouts
from coordinator.store import tables as t
from coordinator.store.database import Database
from protocol.declaration import HARDWARE_LENGTH, printable
from protocol.errors import UserError, WorkerFault
from protocol.lease import Commitment
from protocol.renewal import check_renewal
from protocol.rollout import AT_LEAST, RejectionReason, SamplingParams
from protocol.signing import public_key
from protocol.terms import PROTOCOL_MAX, PROTOCOL_MIN, TURNS_PROTOCOL
from protocol.turns import Turns
from protocol.wire import envelope_from_wire, envelope_to_wire, sampling_to_wire
from protos.rollswarm.v1 import trainer_pb2, trainer_pb2_grpc, worker_pb2, worker_pb2_grpc

MAX_WAIT_S = 30.0
_POLL_S = 0.7
T = TypeVar("T")
_MAX_LEASES = 256
_MAX_RENEWALS = _MAX_LEASES
_CHECKED_AT_ONCE = 16
_MAX_GROUPS = 4096


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """What workers may call."""

    def __init__(
        self,
        db: Database,
        *,
        run_id: str,
        secret: bytes,
        joining: Joining,
        leasing: Leasing,
        intake: Intake,
        temperature: float,
        eos_token_ids: tuple[int, ...],
        metrics: Metrics,
        turns: Mapping[str, Turns] | None = None,
    ) -> None:
        """`turns`: by environment, of those whose tasks take several."""
        self._joining = joining
        self._db = db
        self._clock = DatabaseClock(db)
        self._run_id = run_id
        self._secret = secret
        self._leasing = leasing
        self._line = Line(leasing)
        self._intake = intake
        self._temperature = temperature
        self._eos_token_ids = eos_token_ids
        self._metrics = metrics
        self._rules = {environment: each.rules.digest for environment, each in (turns or {}).items()}

    async def clock(self) -> float:
        """Now, by the database's clock, as tokens need it."""
        return await self._clock.now()

    async def GetChallenge(  # noqa: N802
        self, request: worker_pb2.GetChallengeRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetChallengeResponse:
        least = TURNS_PROTOCOL if self._rules else PROTOCOL_MIN
        if request.protocol_min > PROTOCOL_MAX or request.protocol_max < least:
            raise UserError(
                f"the worker speaks protocol {request.protocol_min} to {request.protocol_max}, this run {least} "
                f"to {PROTOCOL_MAX}: update rollswarm on the older side"
            )
        public_key(request.key_id)
        return worker_pb2.GetChallengeResponse(
            challenge=tokens.make_challenge(self._secret, request.key_id, await self.clock())
        )

    async def Register(  # noqa: N802
        self, request: worker_pb2.RegisterRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.RegisterResponse:
        about = About(
            name=printable(request.name, 64),
            hardware=printable(request.hardware, HARDWARE_LENGTH),
            software=printable(request.software, 64),
            address=address_group(peer_address(context.peer())),
            invite=request.invite,
            work_nonce=request.work_nonce,
        )
        declaration = envelope_from_wire(request.declaration) if request.HasField("declaration") else None
        joined = await self._joining.join(envelope_from_wire(request.challenge), declaration, about)
        return worker_pb2.RegisterResponse(
            token=joined.token,
            token_lifetime_s=tokens.TOKEN_LIFETIME_S,
            run_id=self._run_id,
            notice=joined.notice,
        )

    async def AcquireLeases(  # noqa: N802
        self, request: worker_pb2.AcquireLeasesRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.AcquireLeasesResponse:
        wanted = max(1, min(request.max_leases, _MAX_LEASES))

        granted = await self._line.acquire(caller.get(), wanted, min(request.wait_ms / 1000, MAX_WAIT_S))
        self._metrics.leases_granted.inc(len(granted.leases))
        return worker_pb2.AcquireLeasesResponse(
            leases=[
                worker_pb2.Lease(
                    lease_id=lease.lease_id,
                    sample_id=lease.sample_id,
                    prompt_token_ids=sample.prompt_token_ids,
                    sampling=sampling_to_wire(
                        SamplingParams(self._temperature, sample.max_tokens, self._eos_token_ids)
                    ),
                    seed=sample.seed,
                    min_version=lease.min_version,
                    deadline_ms=int(max(0.0, lease.deadline - granted.now) * 1000),
                    turns=self._rules.get(sample.environment, ""),
                )
                for lease, sample in granted.leases
            ],
            head_version=granted.head,
            reason=granted.reason,
        )

    async def RenewLeases(  # noqa: N802
        self, request: worker_pb2.RenewLeasesRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.RenewLeasesResponse:
        if len(request.progress) > _MAX_RENEWALS:
            raise WorkerFault(RejectionReason.FORM, f"more than {_MAX_RENEWALS} renewals in one call")
        if len({entry.lease_id for entry in request.progress}) < len(request.progress):
            raise WorkerFault(RejectionReason.FORM, "a lease is renewed twice in one call")
        live = await self._leasing.live_among(caller.get(), [entry.lease_id for entry in request.progress])
        progress = [
            (entry.lease_id, Commitment(entry.length, entry.token_digest, entry.policy_version, entry.signature))
            for entry in request.progress
        ]
        # Only about its own live leases a worker can say anything: the signatures of the rest are not worth their check.
        for number, (lease_id, commitment) in enumerate(each for each in progress if each[0] in live):
            if number % _CHECKED_AT_ONCE == _CHECKED_AT_ONCE - 1:
                await asyncio.sleep(0)  # others are served between
            check_renewal(caller.get(), self._run_id, lease_id, commitment)
        renewals, head = await self._leasing.renew(caller.get(), progress)
        at = await self.clock()
        return worker_pb2.RenewLeasesResponse(
            renewals=[
                worker_pb2.LeaseRenewal(
                    lease_id=renewal.lease_id,
                    live=not renewal.problem,
                    deadline_ms=int(max(0.0, renewal.deadline - at) * 1000),
                    reason=renewal.problem,
                )
                for renewal in renewals
            ],
            head_version=head,
        )

    async def ReturnLeases(  # noqa: N802
        self, request: worker_pb2.ReturnLeasesRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ReturnLeasesResponse:
        returned = await self._leasing.give_back(caller.get(), request.lease_ids[:_MAX_LEASES])
        return worker_pb2.ReturnLeasesResponse(returned=returned)

    async def SubmitRollout(  # noqa: N802
        self, request: worker_pb2.SubmitRolloutRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.SubmitRolloutResponse:
        envelope = envelope_from_wire(request.rollout)
        try:
            receipt = await self._intake.submit(caller.get(), envelope)
        except WorkerFault as fault:
            self._metrics.refused.labels(reason=fault.reason).inc()
            raise
        self._metrics.received.inc()
        self._metrics.received_bytes.inc(len(envelope.payload))
        return worker_pb2.SubmitRolloutResponse(receipt=envelope_to_wire(receipt))

    async def GetStanding(  # noqa: N802
        self, request: worker_pb2.GetStandingRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetStandingResponse:
        worker_id = caller.get()
        async with self._db.read() as connection:
            row = (await connection.execute(select(t.workers).where(t.workers.c.worker_id == worker_id))).first()
            if row is None:
                raise WorkerFault(RejectionReason.LEASE, "this key never registered")
            pending = await rollouts.count_pending_of_worker(connection, worker_id)
            notices = await rollouts.latest_verdicts(connection, worker_id, min(request.max_verdicts, 256))
        return worker_pb2.GetStandingResponse(
            credits=row.credits,
            strikes=row.strikes,
            banned=row.banned,
            ban_reason=row.ban_reason,
            accepted=row.accepted,
            rejected=row.rejected,
            pending=pending,
            verdicts=[
                worker_pb2.VerdictNotice(
                    rollout_id=notice.rollout_id,
                    outcome=notice.outcome,
                    reason=notice.reason or "",
                    detail=notice.detail,
                    measurements=measurements(notice.metrics, notice.admitted or {}),
                )
                for notice in notices
            ],
        )


class TrainerService(trainer_pb2_grpc.TrainerServiceServicer):
    """What the trainer may call."""

    def __init__(self, feeding: Feeding, *, run_id: str, temperature: float, scheduling: Scheduling) -> None:
        self._feeding = feeding
        self._run_id = run_id
        self._temperature = temperature
        self._scheduling = scheduling

    def use(self, scheduling: Scheduling) -> None:
        """Tell the trainer these numbers from the next call on."""
        self._scheduling = scheduling

    async def GetRunState(  # noqa: N802
        self, request: trainer_pb2.GetRunStateRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.GetRunStateResponse:
        head, next_batch = await self._feeding.state()
        return trainer_pb2.GetRunStateResponse(
            run_id=self._run_id,
            head_version=None if head is None else head.version,
            head_digest="" if head is None else head.manifest_digest,
            next_batch=next_batch,
            temperature=self._temperature,
            max_staleness=self._scheduling.max_staleness,
            groups_per_batch=self._scheduling.groups_per_batch,
        )

    async def AnnounceVersion(  # noqa: N802
        self, request: trainer_pb2.AnnounceVersionRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.AnnounceVersionResponse:
        rotations = [envelope_from_wire(each) for each in request.key_rotations]
        head = await self._feeding.announce(envelope_from_wire(request.manifest), rotations)
        return trainer_pb2.AnnounceVersionResponse(head_version=head)

    async def PullGroups(  # noqa: N802
        self, request: trainer_pb2.PullGroupsRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.PullGroupsResponse:
        async def attempt() -> list[trainer_pb2.RolloutGroup]:
            return await self._feeding.pull(
                batch=request.batch,
                trainer_version=request.trainer_version,
                held=request.held_group_ids,
                max_groups=max(1, min(request.max_groups, _MAX_GROUPS)),
            )

        found = await poll(attempt, bool, request.wait_ms / 1000)
        return trainer_pb2.PullGroupsResponse(groups=found)

    async def AcknowledgeBatches(  # noqa: N802
        self, request: trainer_pb2.AcknowledgeBatchesRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.AcknowledgeBatchesResponse:
        acknowledged = await self._feeding.acknowledge(request.through_batch)
        return trainer_pb2.AcknowledgeBatchesResponse(acknowledged=acknowledged)

    async def WithdrawVersions(  # noqa: N802
        self, request: trainer_pb2.WithdrawVersionsRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.WithdrawVersionsResponse:
        done = await self._feeding.withdraw(request.kept_version)
        return trainer_pb2.WithdrawVersionsResponse(
            next_version=done.next_version, next_batch=done.next_batch, withdrawn=done.withdrawn, purged=done.purged
        )

    async def ReportStep(  # noqa: N802
        self, request: trainer_pb2.ReportStepRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.ReportStepResponse:
        await self._feeding.report(
            batch=request.batch,
            trainer_version=request.trainer_version,
            optimizer_steps=request.optimizer_steps,
            metrics=dict(request.metrics),
            dropped=dict(request.dropped),
            trained=request.trained_rollout_ids,
            alarms=dict(request.alarms),
        )
        return trainer_pb2.ReportStepResponse()


async def poll(attempt: Callable[[], Awaitable[T]], enough: Callable[[T], bool], wait_s: float) -> T:
    """Try until the answer is enough or `wait_s` (at most 30 s) is over; the last answer counts.

    What is waited for is written by other processes, so the database is asked again rather than an event awaited.
    """
    deadline = time.monotonic() + min(wait_s, MAX_WAIT_S)
    while True:
        answer = await attempt()
        if enough(answer) or time.monotonic() >= deadline:
            return answer
        await asyncio.sleep(_POLL_S)


def measurements(metrics: Mapping[str, float], admitted: Mapping[str, float]) -> list[worker_pb2.Measurement]:
    """What was measured beside its bound, for every number that has one."""
    return [
        worker_pb2.Measurement(name=name, value=metrics[name], admitted=bound, at_least=name in AT_LEAST)
        for name, bound in sorted(admitted.items())
        if name in metrics
    ]
