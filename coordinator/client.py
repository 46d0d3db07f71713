"""The clients that the worker and the trainer use to talk to the coordinator. No torch, no database.

A call that fails because the coordinator is away is repeated with back-off and jitter, for as long as it takes, and says
so once per outage; a call that the coordinator refuses raises at once (`WorkerFault`, `UserError`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import aiohttp
import grpc
from google.protobuf.message import DecodeError

from protocol.declaration import Declaration
from protocol.errors import BadSignature, OurFault, UserError, WorkerFault
from protocol.lease import Commitment
from protocol.rollout import RejectionReason, RolloutGroup, SamplingParams
from protocol.signing import CHALLENGE, DECLARATION, RECEIPT, Identity, SignedEnvelope, open_envelope
from protocol.terms import PROTOCOL_MAX, PROTOCOL_MIN, WELL_KNOWN_PATH, RunTerms, parse_terms
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
T = TypeVar("T")

MAX_MESSAGE_BYTES = 256 << 20
_BACKOFF_START_S = 0.25
_BACKOFF_MAX_S = 15.0
_CALL_TIMEOUT_S = 30.0
_AWAY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INTERNAL})
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)


class Backoff:
    """Exponential back-off with full jitter."""

    def __init__(self, start: float = _BACKOFF_START_S, most: float = _BACKOFF_MAX_S) -> None:
        self._start, self._most = start, most
        self._attempt = 0

    def reset(self) -> None:
        self._attempt = 0

    async def pause(self) -> float:
        """Wait before the next attempt; how long."""
        ceiling = min(self._most, self._start * 2**self._attempt)
        self._attempt += 1
        seconds = random.uniform(ceiling / 2, ceiling)
        await asyncio.sleep(seconds)
        return seconds


async def fetch_terms(
    url: str, *, patience_s: float | None = None, on_retry: Callable[[str], None] = log.warning
) -> RunTerms:
    """The run's terms from a coordinator's URL; tried again while the coordinator is down.

    `patience_s`: give up after so long (None: never). Raises UserError for a URL that is none, or serves no terms.
    """
    if not url.startswith(("http://", "https://")):
        raise UserError(f"--coordinator must be an http:// or https:// URL, got {url!r}")
    target = url.rstrip("/") + WELL_KNOWN_PATH
    backoff, begun = Backoff(), time.monotonic()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=15)) as session:
        while True:
            try:
                async with session.get(target, allow_redirects=False) as response:
                    if response.status == 200:
                        return parse_terms(await response.content.read(1 << 21), url)
                    problem = f"{target} answered {response.status}"
                    if response.status in (301, 302, 307, 308, 400, 401, 403, 404, 405):
                        raise UserError(f"{problem}: is {url} a coordinator's URL?")
            except aiohttp.InvalidURL:
                raise UserError(f"--coordinator is no URL: {url!r}") from None
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = f"cannot reach {url} ({error or type(error).__name__})"
            if patience_s is not None and time.monotonic() - begun >= patience_s:
                raise UserError(f"{problem}: check the URL, and that the coordinator runs")
            seconds = await backoff.pause()
            on_retry(f"{problem}; trying again (waited {seconds:.1f} s)")


class _Channel:
    """One channel to one of the endpoints, with retries for as long as the coordinator is away, or until told to `stop`."""

    def __init__(
        self, endpoints: Sequence[str], on_outage: Callable[[str], None], stop: asyncio.Event | None = None
    ) -> None:
        if not endpoints:
            raise UserError("the run's terms name no gRPC endpoint")
        addresses = endpoints[0] if len(endpoints) == 1 else "ipv4:" + ",".join(endpoints)
        self.channel = grpc.aio.insecure_channel(addresses, options=_CHANNEL_OPTIONS)
        self._on_outage = on_outage
        self._stop = stop

    async def call(self, invoke: Callable[[], Awaitable[T]], *, patience_s: float | None) -> T:
        """Invoke until it answers. Raises WorkerFault or UserError if refused, OurFault when patience ends."""
        backoff, begun, told = Backoff(), time.monotonic(), False
        while True:
            try:
                return await invoke()
            except grpc.aio.AioRpcError as error:
                if error.code() not in _AWAY:
                    raise _refusal(error) from None
                if patience_s is not None and time.monotonic() - begun >= patience_s:
                    raise OurFault(f"the coordinator is away: {error.details()}") from None
                if self._stop is not None and self._stop.is_set():
                    raise OurFault("stopped while the coordinator is away: start again to go on from here") from None
                if not told:
                    self._on_outage(f"the coordinator is away ({error.code().name.lower()}); retrying with back-off")
                    told = True
            await backoff.pause()


def _refusal(error: grpc.aio.AioRpcError) -> Exception:
    """The error that a refused call stands for."""
    reason = next((value for key, value in error.trailing_metadata() or () if key == "rollswarm-reason"), None)
    detail = error.details() or error.code().name
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return BadSignature(detail)
    if reason is not None:
        return WorkerFault(str(reason), detail)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:  # gRPC itself refused the message, and always will
        return WorkerFault(RejectionReason.FORM, detail)
    return UserError(f"the coordinator refused: {detail}")


@dataclass(frozen=True, slots=True)
class LeasedSample:
    """A lease as the worker holds it. `deadline`: by this process's monotonic clock."""

    lease_id: str
    sample_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    min_version: int
    deadline: float


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
    ) -> None:
        self.notice = ""  # of the latest registration
        self._declaration = declaration
        self._terms = terms
        self._identity = identity
        self._about = {"name": name, "hardware": hardware, "software": software}
        self._link = _Channel(terms.grpc_endpoints, on_outage)
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._link.channel)
        self._token = ""
        self._token_expires = 0.0
        self._registering = asyncio.Lock()

    async def register(self, patience_s: float | None = None) -> None:
        """Prove the identity and get a token. Raises WorkerFault if the key is banned."""
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
        answer = await self._link.call(
            lambda: self._stub.Register(
                worker_pb2.RegisterRequest(
                    challenge=envelope, declaration=self._declare(challenge.challenge), **self._about
                ),
                timeout=_CALL_TIMEOUT_S,
            ),
            patience_s=patience_s,
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
        begun = time.monotonic()
        request = worker_pb2.RenewLeasesRequest(
            progress=[
                worker_pb2.LeaseProgress(
                    lease_id=lease_id,
                    length=commitment.length,
                    token_digest=commitment.digest,
                    policy_version=commitment.version,
                )
                for lease_id, commitment in progress.items()
            ]
        )
        answer = await self._authorized(self._stub.RenewLeases, request)
        renewed = {
            entry.lease_id: (begun + entry.deadline_ms / 1000, "" if entry.live else entry.reason or "not live")
            for entry in answer.renewals
        }
        return renewed, answer.head_version

    async def give_back(self, lease_ids: Sequence[str], reason: str, patience_s: float | None = None) -> int:
        """Return leases unfinished; how many were still live."""
        request = worker_pb2.ReturnLeasesRequest(lease_ids=lease_ids, reason=reason)
        answer = await self._authorized(self._stub.ReturnLeases, request, patience_s=patience_s)
        return int(answer.returned)

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


class TrainerClient:
    """The trainer's connection to the private listener. `key_rotations`: statements that lead to the trainer's key.

    `stop`: once it is set, a coordinator that is away is no longer waited for (OurFault).
    """

    def __init__(
        self,
        endpoint: str,
        token: str,
        on_outage: Callable[[str], None] = log.warning,
        key_rotations: Sequence[SignedEnvelope] = (),
        stop: asyncio.Event | None = None,
    ) -> None:
        self._key_rotations = key_rotations
        self._link = _Channel((endpoint,), on_outage, stop)
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

    async def report(
        self,
        *,
        batch: int,
        trainer_version: int,
        optimizer_steps: int,
        metrics: Mapping[str, float],
        dropped: Mapping[str, int],
        trained: Sequence[str],
    ) -> None:
        """Report what one step did."""
        request = trainer_pb2.ReportStepRequest(
            batch=batch,
            trainer_version=trainer_version,
            optimizer_steps=optimizer_steps,
            metrics=dict(metrics),
            dropped=dict(dropped),
            trained_rollout_ids=trained,
        )
        await self._call(self._stub.ReportStep, request)

    async def close(self) -> None:
        await self._link.channel.close()

    async def _call(self, method: Any, request: Any, timeout: float = _CALL_TIMEOUT_S) -> Any:
        return await self._link.call(lambda: method(request, metadata=self._metadata, timeout=timeout), patience_s=None)
