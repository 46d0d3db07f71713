"""Hostile calls of every RPC of both services, each chosen by its number: random and mutated messages, and odd metadata."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from protocol.lease import Commitment
from protocol.renewal import sign_renewal
from protocol.rollout import token_digest
from protocol.signing import CHALLENGE, MANIFEST, ROLLOUT, Identity
from protocol.wire import envelope_to_wire, rollout_to_payload
from protos.rollswarm.v1 import trainer_pb2, worker_pb2
from tests.adversary.fuzz.mutations import FIELDS, other_bytes
from tests.adversary.fuzz.served import TRAINER_TOKEN
from tests.adversary.fuzz.site import Report, Site, Worker
from tests.factories import RUN_ID, make_rollout

_AT_ONCE = 16
_DEADLINE_S = 120.0
_WORKERS = 4
_BAD = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)
_TEXTS = (
    "",
    "\0",
    "a\0b",
    "\U0010ffff",
    "%s%n",
    "../../etc/passwd",
    "' OR 1=1 --",
    "ed25519:" + "0" * 64,
    "x" * 5000,
    "NaN",
)
_INTEGERS = (0, 1, 2, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1)
_FLOATS = (0.0, -0.0, 1e308, float("inf"), float("-inf"), float("nan"), 1e-320, 0.5)
_METHODS: tuple[tuple[str, str, Any], ...] = tuple(
    (service.full_name, method.name, method.input_type._concrete_class)
    for service in (
        worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
        trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"],
    )
    for method in service.methods
)
_OTHERS = (
    "/grpc.health.v1.Health/Check",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/rollswarm.v1.WorkerService/Nothing",
    "/nothing",
)


class GrpcDoor:
    """Calls by number: the same seed makes the same ones, up to what the coordinator answers."""

    def __init__(self, site: Site, seed: int = 0) -> None:
        self._site = site
        self._seed = seed
        self._workers: list[Worker] = []
        self._leases: list[tuple[Worker, worker_pb2.Lease]] = []
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.report = Report()

    async def run(self, start: int, stop: int) -> Report:
        """Calls `start` to `stop`; the report goes on from earlier ones."""
        ports = {"WorkerService": self._site.grpc, "TrainerService": self._site.trainer}
        self._channels = {name: grpc.aio.insecure_channel(f"127.0.0.1:{port}") for name, port in ports.items()}
        numbers = iter(range(start, stop))

        async def caller() -> None:
            for number in numbers:
                await self._one(number)

        try:
            await asyncio.gather(*(caller() for _ in range(min(_AT_ONCE, stop - start))))
        finally:
            for channel in self._channels.values():
                await channel.close()
        return self.report

    async def _one(self, number: int) -> None:
        draw = random.Random(f"grpc/{self._seed}/{number}")
        if len(self._workers) < _WORKERS:
            self._workers.append(self._site.join())
        worker = draw.choice(self._workers)
        service, name, kind = draw.choice(_METHODS)
        side = service.rpartition(".")[2]
        method = draw.choice(_OTHERS) if draw.random() < 0.02 else f"/{service}/{name}"
        data = self._message(draw, name, kind, worker)
        call = self._channels[side].unary_unary(method)
        gzip = grpc.Compression.Gzip if draw.random() < 0.01 else None
        metadata = self._metadata(draw, side, worker)
        try:
            answer = await call(data, metadata=metadata, timeout=_DEADLINE_S, compression=gzip)
        except grpc.aio.AioRpcError as error:
            self._refused(number, f"{name}", method, worker, error)
            return
        self.report.answers["grpc OK"] += 1
        if method.endswith("/AcquireLeases"):
            granted = worker_pb2.AcquireLeasesResponse.FromString(answer)
            self._leases = [*self._leases, *((worker, lease) for lease in granted.leases)][-64:]

    def _refused(self, number: int, name: str, method: str, worker: Worker, error: grpc.aio.AioRpcError) -> None:
        code, text = error.code(), error.details() or ""
        self.report.answers[f"grpc {code.name}"] += 1
        if code in _BAD or "Traceback" in text or 'File "' in text:
            self.report.bad(f"grpc {self._seed}/{number} {method} ({name}): {code.name} {text[:300]}")
        if code is grpc.StatusCode.PERMISSION_DENIED:  # banned, as it should be; on it goes
            self._leases = [each for each in self._leases if each[0] is not worker]
            self._site.pardon(worker)

    def _metadata(self, draw: random.Random, side: str, worker: Worker) -> Sequence[tuple[str, str | bytes]]:
        right = worker.token if side == "WorkerService" else TRAINER_TOKEN
        if draw.random() < 0.85:
            return (("authorization", f"Bearer {right}"),)
        wrong: list[tuple[str, str | bytes]] = [
            (
                "authorization",
                f"Bearer {draw.choice((right[:-3], right[::-1], '', 'Bearer', 'a' * 3000, '=====', '!'))}",
            ),
            ("authorization", right),
            ("authorization-bin", draw.randbytes(40)),
            ("x-bin", draw.randbytes(draw.choice((0, 1, 4000)))),
            ("grpc-timeout", draw.choice(("1n", "x", "99999999S"))),
            ("user-agent", "x" * draw.choice((1, 9000))),
            ("content-type", "text/html"),
        ]
        return tuple(draw.sample(wrong, draw.randrange(4)))

    def _message(self, draw: random.Random, name: str, kind: Any, worker: Worker) -> bytes:
        """Rubbish, a message with random fields, or one that is nearly right; some have their bytes changed then."""
        how = draw.random()
        if how < 0.08:
            return draw.randbytes(draw.choice((0, 1, 7, 200, 5000)))
        near = _NEAR.get(name)
        message = kind()
        if near is None or how < 0.45:
            fill(draw, message)
        else:
            message = near(self, draw, worker)
        if name in ("AcquireLeases", "PullGroups"):  # a wait is no fault, but it takes the fuzz's own time
            message.wait_ms = draw.choice((0, 0, 0, 1, 50))
        data = message.SerializeToString()
        return other_bytes(draw, data) if how > 0.85 and "wait_ms" not in kind.DESCRIPTOR.fields_by_name else data

    def _lease(self, draw: random.Random, worker: Worker) -> worker_pb2.Lease:
        """One of this worker's, or anybody's, or none."""
        mine = [lease for owner, lease in self._leases if owner is worker]
        found = draw.choice(mine) if mine else worker_pb2.Lease(lease_id="none", sample_id="none")
        return draw.choice(self._leases)[1] if self._leases and draw.random() < 0.1 else found

    def challenge(self, draw: random.Random, worker: Worker) -> Message:
        key = draw.choice((worker.identity.key_id, worker.identity.key_id.upper(), draw.choice(_TEXTS)))
        return worker_pb2.GetChallengeRequest(key_id=key, protocol_min=1, protocol_max=1)

    def registration(self, draw: random.Random, worker: Worker) -> Message:
        request = worker_pb2.RegisterRequest(
            name=draw.choice(_TEXTS), hardware=draw.choice(_TEXTS), invite=draw.choice(_TEXTS)
        )
        request.challenge.CopyFrom(envelope_to_wire(worker.identity.sign(CHALLENGE, draw.randbytes(40))))
        return request

    def acquire(self, draw: random.Random, worker: Worker) -> Message:
        return worker_pb2.AcquireLeasesRequest(max_leases=draw.choice((0, 1, 4, 2**32 - 1)))

    def renew(self, draw: random.Random, worker: Worker) -> Message:
        request = worker_pb2.RenewLeasesRequest()
        for _ in range(draw.choice((1, 1, 2, 1100))):
            lease = self._lease(draw, worker)
            length = draw.choice((0, 1, 3, 12, *_INTEGERS[:7]))
            digest = draw.choice((token_digest((1, 2, 3)), b"", draw.randbytes(32), draw.randbytes(9000)))
            commitment = Commitment(length, digest, draw.choice(_INTEGERS))
            signature = sign_renewal(worker.identity, RUN_ID, lease.lease_id, commitment)
            request.progress.add(
                lease_id=lease.lease_id,
                length=length,
                token_digest=digest,
                policy_version=commitment.version,
                signature=draw.choice((signature, signature, b"", draw.randbytes(64))),
            )
            if len(request.progress) > 2 and len(digest) > 32:
                break
        return request

    def give_back(self, draw: random.Random, worker: Worker) -> Message:
        ids = [self._lease(draw, worker).lease_id for _ in range(draw.choice((0, 1, 3)))]
        return worker_pb2.ReturnLeasesRequest(lease_ids=[*ids, *draw.choices(_TEXTS, k=draw.randrange(3))])

    def submit(self, draw: random.Random, worker: Worker) -> Message:
        """A rollout of good form under a live lease, with some of its fields changed, signed by the worker's own key."""
        lease = self._lease(draw, worker)
        rollout = make_rollout(lease.lease_id, lease.sample_id)
        payload = worker_pb2.RolloutPayload.FromString(rollout_to_payload(rollout))
        if draw.random() < 0.9:
            for mutate in draw.choices(FIELDS, k=draw.choice((1, 1, 2))):
                mutate(draw, payload, payload)
        if draw.random() < 0.2:
            setattr(payload, draw.choice(("run_id", "lease_id", "sample_id", "precision")), draw.choice(_TEXTS))
        if payload.spans and draw.random() < 0.2:
            draw.choice(payload.spans).version = draw.choice(_INTEGERS)
        signed = worker.identity.sign(draw.choice((ROLLOUT, ROLLOUT, ROLLOUT, CHALLENGE)), payload.SerializeToString())
        return worker_pb2.SubmitRolloutRequest(rollout=envelope_to_wire(signed))

    def announce(self, draw: random.Random, worker: Worker) -> Message:
        """Never signed by the trainer's key: that one is believed."""
        text = draw.choice((b"{}", b"[" * 30_000, b'{"version": 1e400}', b"\xff\xfe", b"null", draw.randbytes(100)))
        signer = draw.choice((worker.identity, Identity.from_seed(draw.randbytes(32))))
        return trainer_pb2.AnnounceVersionRequest(manifest=envelope_to_wire(signer.sign(MANIFEST, text)))

    def report_step(self, draw: random.Random, worker: Worker) -> Message:
        request = trainer_pb2.ReportStepRequest(batch=draw.choice(_INTEGERS), trainer_version=draw.choice(_INTEGERS))
        request.optimizer_steps = draw.choice(_INTEGERS)
        for _ in range(draw.randrange(4)):
            request.metrics[draw.choice(_TEXTS)] = draw.choice(_FLOATS)
            request.dropped[draw.choice(_TEXTS)] = draw.choice(_INTEGERS[:7])
        request.trained_rollout_ids.extend(draw.choices(_TEXTS, k=draw.randrange(3)))
        return request


Near = Callable[[GrpcDoor, random.Random, Worker], Message]
_NEAR: dict[str, Near] = {
    "GetChallenge": GrpcDoor.challenge,
    "Register": GrpcDoor.registration,
    "AcquireLeases": GrpcDoor.acquire,
    "RenewLeases": GrpcDoor.renew,
    "ReturnLeases": GrpcDoor.give_back,
    "SubmitRollout": GrpcDoor.submit,
    "AnnounceVersion": GrpcDoor.announce,
    "ReportStep": GrpcDoor.report_step,
}


def fill(draw: random.Random, message: Any, depth: int = 0) -> None:
    """Give some fields values of the right type that nobody would send."""
    for field in message.DESCRIPTOR.fields:
        if draw.random() < 0.3:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value = field.message_type.fields_by_name["value"]
            getattr(message, field.name)[draw.choice(_TEXTS)] = _value(draw, value)
        elif field.message_type is not None:
            if depth < 3:
                inner = getattr(message, field.name)
                for each in [inner.add() for _ in range(draw.choice((0, 1, 3)))] if field.is_repeated else [inner]:
                    fill(draw, each, depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).extend(_value(draw, field) for _ in range(draw.choice((0, 1, 3, 300))))
        else:
            setattr(message, field.name, _value(draw, field))


def _value(draw: random.Random, field: FieldDescriptor) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return (
            draw.choice(_TEXTS)
            if field.type == FieldDescriptor.TYPE_STRING
            else draw.randbytes(draw.choice((0, 32, 64, 999)))
        )
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return draw.choice(_FLOATS)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return draw.random() < 0.5
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return draw.choice((0, 1, 2, 77))
    most = 2**32 if field.cpp_type == FieldDescriptor.CPPTYPE_UINT32 else 2**64
    return draw.choice([each for each in _INTEGERS if each < most])
