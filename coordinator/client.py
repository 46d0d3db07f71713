"""The clients that the worker and the trainer use to talk to the coordinator. No torch, no database.

A call that fails because the coordinator is away is repeated with back-off and jitter, for as long as it takes, and says
so once per outage; a call that the coordinator refuses raises at once (`WorkerFault`, `UserError`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from coordinator.channel import Backoff, Channel, parse_endpoint
from coordinator.discovery import fetch_terms
from protocol.declaration import Declaration
from protocol.errors import BadSignature, OurFault, UserError
from protocol.joining import WORK, solve
from protocol.lease import Commitment
from protocol.renewal import sign_renewal
from protocol.rollout import RolloutGroup, SamplingParams
from protocol.signing import CHALLENGE, DECLARATION, RECEIPT, Identity, SignedEnvelope, open_envelope
from protocol.terms import PROTOCOL_MAX, PROTOCOL_MIN, RunTerms
from protocol.trust import Trust, is_loopback
from protocol.wire import (
    declaration_to_payload,
    envelope_from_wire,
    envelope_to_wire,
    group_from_wire,
    rollout_id,
    sampling_from_wire,
)
from protos.rollswarm.v1 import common_pb2, trainer_pb2, trainer_pb2_grpc, worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

__all__ = ["Backoff", "LeasedSample", "RunState", "TrainerClient", "Trust", "WorkerClient", "fetch_terms"]

_CALL_TIMEOUT_S = 30.0
_LEASES_AT_ONCE = 256  # in one call, as the coordinator takes them
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LeasedSample:
    """A lease as the worker holds it. `deadline`: by this process's monotonic clock. `turns`: the digest of the rules that
    its task's turns go by, empty if it has one."""

    lease_id: str
    sample_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    min_version: int
    deadline: float
    turns: str = ""


def _batched(items: Iterable[T]) -> Iterator[list[T]]:
    """The items in lists that one call may hold."""
    rest = iter(items)
    while some := list(itertools.islice(rest, _LEASES_AT_ONCE)):
        yield some


def _leased(lease: worker_pb2.Lease, begun: float) -> LeasedSample:
    """Raises ValueError for sampling parameters that are none."""
    return LeasedSample(
        lease_id=lease.lease_id,
        sample_id=lease.sample_id,
        prompt_token_ids=tuple(lease.prompt_token_ids),
        sampling=sampling_from_wire(lease.sampling),
        seed=lease.seed,
        min_version=lease.min_version,
        deadline=begun + lease.deadline_ms / 1000,
        turns=lease.turns,
    )


class WorkerClient:
    """A worker's connection: registers by signing a challenge, renews its token by itself.

    `declaration`: what it computes with; None (for looking only) leaves what was declared before.
    """

    def __init__(
        self,
        terms: RunTerms,
        identity: Identity,
        *,
        name: str,
        hardware: str,
        software: str,
        declaration: Declaration | None = None,
        on_outage: Callable[[str], None] = log.warning,
        trust: Trust | None = None,
        invite: str = "",
    ) -> None:
        self.notice = ""  # of the latest registration
        self._declaration = declaration
        self._terms = terms
        self._invite = invite
        self._work: int | None = None
        self._identity = identity
        self._about = {"name": name, "hardware": hardware, "software": software}
        self._link = Channel(terms.grpc_endpoints, on_outage, trust=trust)
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._link.channel)
        self._token = ""
        self._token_expires = 0.0
        self._registering = asyncio.Lock()

    async def register(self, patience_s: float | None = None) -> None:
        """Prove the identity and get a token; a new key does the work that the run asks for, if it does.

        Raises UserError if the run does not let this key in.
        """
        try:
            await self._register(patience_s)
        except UserError:
            if self._terms.join != WORK or self._work is not None:
                raise
            bits = self._terms.work_bits
            self._work = await asyncio.to_thread(solve, self._terms.run_id, self._identity.key_id, bits)
            await self._register(patience_s)

    async def _register(self, patience_s: float | None) -> None:
        challenge = await self._link.call(
            lambda: self._stub.GetChallenge(
                worker_pb2.GetChallengeRequest(
                    key_id=self._identity.key_id, protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX
                ),
                timeout=_CALL_TIMEOUT_S,
            ),
            patience_s=patience_s,
        )
        envelope = envelope_to_wire(self._identity.sign(CHALLENGE, challenge.challenge))
        request = worker_pb2.RegisterRequest(
            challenge=envelope,
            declaration=self._declare(challenge.challenge),
            invite=self._invite,
            work_nonce=self._work or 0,
            **self._about,
        )
        answer = await self._link.call(
            lambda: self._stub.Register(request, timeout=_CALL_TIMEOUT_S), patience_s=patience_s
        )
        if answer.run_id != self._terms.run_id:
            raise UserError(f"the coordinator now serves run {answer.run_id}, not {self._terms.run_id}: join again")
        self.notice = answer.notice
        self._token = answer.token
        self._token_expires = time.monotonic() + answer.token_lifetime_s * 0.8

    def _declare(self, challenge: bytes) -> common_pb2.SignedEnvelope | None:
        if self._declaration is None:
            return None
        payload = declaration_to_payload(self._declaration, challenge)
        return envelope_to_wire(self._identity.sign(DECLARATION, payload))

    async def acquire(self, count: int, policy_version: int, wait_s: float) -> tuple[list[LeasedSample], int, str]:
        """Leases, the head version, and why there are none if there are none."""
        begun = time.monotonic()
        answer = await self._authorized(
            self._stub.AcquireLeases,
            worker_pb2.AcquireLeasesRequest(
                max_leases=count, policy_version=policy_version, wait_ms=int(wait_s * 1000)
            ),
            timeout=wait_s + _CALL_TIMEOUT_S,
        )
        try:
            leases = [_leased(lease, begun) for lease in answer.leases[:count]]
        except ValueError as error:
            raise OurFault(f"the coordinator granted a lease that is none: {error}") from None
        return leases, answer.head_version, answer.reason

    async def renew(self, progress: Mapping[str, Commitment]) -> tuple[dict[str, tuple[float, str]], int]:
        """For each lease: its new deadline (monotonic) and "" or why it is no longer live; and the head version."""
        renewed: dict[str, tuple[float, str]] = {}
        head = 0
        for some in _batched(progress.items()):
            begun = time.monotonic()
            request = worker_pb2.RenewLeasesRequest(
                progress=[
                    worker_pb2.LeaseProgress(
                        lease_id=lease_id,
                        length=commitment.length,
                        token_digest=commitment.digest,
                        policy_version=commitment.version,
                        signature=sign_renewal(self._identity, self._terms.run_id, lease_id, commitment),
                    )
                    for lease_id, commitment in some
                ]
            )
            answer = await self._authorized(self._stub.RenewLeases, request)
            head = answer.head_version
            for entry in answer.renewals:
                problem = "" if entry.live else entry.reason or "not live"
                renewed[entry.lease_id] = (begun + entry.deadline_ms / 1000, problem)
        return renewed, head

    async def give_back(self, lease_ids: Sequence[str], reason: str, patience_s: float | None = None) -> int:
        """Return leases unfinished; how many were still live."""
        returned = 0
        for some in _batched(lease_ids):
            request = worker_pb2.ReturnLeasesRequest(lease_ids=some, reason=reason)
            answer = await self._authorized(self._stub.ReturnLeases, request, patience_s=patience_s)
            returned += int(answer.returned)
        return returned

    async def submit(self, envelope: SignedEnvelope, patience_s: float | None = None) -> worker_pb2.Receipt:
        """Hand in a signed rollout and check the receipt.

        Raises WorkerFault with the reason if it is refused, OurFault for an answer that is no receipt of it.
        """
        request = worker_pb2.SubmitRolloutRequest(rollout=envelope_to_wire(envelope))
        answer = await self._authorized(self._stub.SubmitRollout, request, patience_s=patience_s)
        receipt = worker_pb2.Receipt()
        try:
            signed = envelope_from_wire(answer.receipt)
            receipt.ParseFromString(open_envelope(signed, RECEIPT, pinned=(self._terms.coordinator_key,)))
        except (BadSignature, DecodeError) as error:
            raise OurFault(f"the answer is no receipt of the coordinator: {error}") from None
        if (receipt.run_id, receipt.rollout_id) != (self._terms.run_id, rollout_id(envelope.payload)):
            raise OurFault(f"the answer is a receipt of something else: {receipt.rollout_id:.80}")
        return receipt

    async def standing(self, verdicts: int = 16, patience_s: float | None = None) -> worker_pb2.GetStandingResponse:
        """The worker's own standing."""
        request = worker_pb2.GetStandingRequest(max_verdicts=verdicts)
        return await self._authorized(self._stub.GetStanding, request, patience_s=patience_s)

    async def close(self) -> None:
        await self._link.channel.close()

    async def _authorized(
        self, method: Any, request: Any, *, timeout: float = _CALL_TIMEOUT_S, patience_s: float | None = None
    ) -> Any:
        """Call with a token; a token that is refused (the run's secret changed, clocks jumped) is replaced once."""
        for attempt in (0, 1):
            async with self._registering:
                if time.monotonic() >= self._token_expires:
                    await self.register(patience_s)
            metadata = (("authorization", f"Bearer {self._token}"),)
            try:
                return await self._link.call(
                    partial(method, request, metadata=metadata, timeout=timeout),
                    patience_s=patience_s,
                )
            except BadSignature:
                if attempt:
                    raise
                self._token_expires = 0.0
        raise AssertionError("unreachable")


@dataclass(frozen=True, slots=True)
class RunState:
    """Where the run stands, for a trainer that begins or resumes."""

    run_id: str
    head_version: int | None
    head_digest: str
    next_batch: int
    temperature: float
    max_staleness: int
    groups_per_batch: int


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """First version and batch numbers never used; versions withdrawn and rollouts purged by the call."""

    next_version: int
    next_batch: int
    withdrawn: int
    purged: int


class TrainerClient:
    """The trainer's connection to the private listener. `key_rotations`: statements that lead to the trainer's key.

    `endpoint`: `host:port` on loopback, `https://host:port` elsewhere, believed by `ca` or the machine's own authorities.
    `stop`: once it is set, a coordinator that is away is no longer waited for (OurFault).
    """

    def __init__(
        self,
        endpoint: str,
        token: str,
        on_outage: Callable[[str], None] = log.warning,
        key_rotations: Sequence[SignedEnvelope] = (),
        stop: asyncio.Event | None = None,
        ca: Path | None = None,
    ) -> None:
        at = parse_endpoint(endpoint)
        if not at.encrypted and not endpoint.startswith("http://") and not is_loopback(at.host):
            raise UserError(
                f"the trainer's token would travel readable to {endpoint}: use https://{at.address} (with coordinator_ca if "
                "the run has an authority of its own), or http:// to say that you mean plaintext"
            )
        self._key_rotations = key_rotations
        trust = Trust(f"https://{at.address}", ca) if at.encrypted else None
        self._link = Channel((endpoint,), on_outage, stop, trust)
        self._stub = trainer_pb2_grpc.TrainerServiceStub(self._link.channel)
        self._metadata = (("authorization", f"Bearer {token}"),)

    async def state(self) -> RunState:
        answer = await self._call(self._stub.GetRunState, trainer_pb2.GetRunStateRequest())
        return RunState(
            run_id=answer.run_id,
            head_version=answer.head_version if answer.HasField("head_version") else None,
            head_digest=answer.head_digest,
            next_batch=answer.next_batch,
            temperature=answer.temperature,
            max_staleness=answer.max_staleness,
            groups_per_batch=answer.groups_per_batch,
        )

    async def announce(self, envelope: SignedEnvelope) -> int:
        """Make a version known; the head afterwards."""
        request = trainer_pb2.AnnounceVersionRequest(
            manifest=envelope_to_wire(envelope), key_rotations=map(envelope_to_wire, self._key_rotations)
        )
        return int((await self._call(self._stub.AnnounceVersion, request)).head_version)

    async def pull(
        self, *, batch: int, trainer_version: int, held: Sequence[str], max_groups: int, wait_s: float
    ) -> list[RolloutGroup]:
        """Groups of this batch that are not held yet; none if none became ready in time."""
        request = trainer_pb2.PullGroupsRequest(
            batch=batch,
            trainer_version=trainer_version,
            held_group_ids=held,
            max_groups=max_groups,
            wait_ms=int(wait_s * 1000),
        )
        answer = await self._call(self._stub.PullGroups, request, timeout=wait_s + _CALL_TIMEOUT_S)
        return [group_from_wire(group) for group in answer.groups]

    async def acknowledge(self, through_batch: int) -> int:
        """A checkpoint holds all batches up to this one."""
        request = trainer_pb2.AcknowledgeBatchesRequest(through_batch=through_batch)
        return int((await self._call(self._stub.AcknowledgeBatches, request)).acknowledged)

    async def withdraw(self, kept_version: int) -> Withdrawn:
        """Take back every version after `kept_version`. Raises UserError if that one can't be gone back to."""
        request = trainer_pb2.WithdrawVersionsRequest(kept_version=kept_version)
        answer = await self._call(self._stub.WithdrawVersions, request)
        return Withdrawn(answer.next_version, answer.next_batch, answer.withdrawn, answer.purged)

    async def report(
        self,
        *,
        batch: int,
        trainer_version: int,
        optimizer_steps: int,
        metrics: Mapping[str, float],
        dropped: Mapping[str, int],
        trained: Sequence[str],
        alarms: Mapping[str, str] | None = None,
    ) -> None:
        """Report what one step did. `alarms`: those that last, a sentence by name."""
        request = trainer_pb2.ReportStepRequest(
            batch=batch,
            trainer_version=trainer_version,
            optimizer_steps=optimizer_steps,
            metrics=dict(metrics),
            dropped=dict(dropped),
            trained_rollout_ids=trained,
            alarms=dict(alarms or {}),
        )
        await self._call(self._stub.ReportStep, request)

    async def close(self) -> None:
        await self._link.channel.close()

    async def _call(self, method: Any, request: Any, timeout: float = _CALL_TIMEOUT_S) -> Any:
        return await self._link.call(lambda: method(request, metadata=self._metadata, timeout=timeout), patience_s=None)
