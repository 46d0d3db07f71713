"""Two gRPC listeners: a public one for workers, a private one for the trainer, each with health checks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from coordinator.interceptors import (
    AddressInterceptor,
    ErrorInterceptor,
    KeyInterceptor,
    ParseInterceptor,
    StreamInterceptor,
    TrainerAuthInterceptor,
    WorkerAuthInterceptor,
)
from coordinator.limits import Door, DoorLimits
from coordinator.service import TrainerService, WorkerService
from coordinator.tls import ServerTls
from protocol.errors import UserError
from protos.rollswarm.v1 import trainer_pb2_grpc, worker_pb2_grpc

_WORKER_SERVICE = "rollswarm.v1.WorkerService"
_ENVELOPE_OVERHEAD_BYTES = 4096
_TRAINER_MESSAGE_BYTES = 256 << 20
# Nothing that a stranger sends is taken in beyond these. Compressed messages are refused: rollouts hardly shrink, and what
# would grow on our side is a way to fill memory.
_PUBLIC_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
    ("grpc.max_concurrent_streams", 128),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 3),
    ("grpc.max_connection_idle_ms", 600_000),
)


@dataclass(frozen=True, slots=True)
class Listener:
    """A started server and the port it listens on."""

    server: grpc.aio.Server
    port: int

    async def stop(self, grace_s: float) -> None:
        await self.server.stop(grace_s)


async def serve_workers(
    service: WorkerService,
    *,
    secret: bytes,
    host: str,
    port: int,
    max_payload_bytes: int,
    tls: ServerTls | None = None,
    door: Door | None = None,
    max_connections: int = 16_384,
    reflection: bool = False,
    tracing: grpc.aio.ServerInterceptor | None = None,
) -> Listener:
    """The public listener. A message larger than a submission may be is refused before it is parsed.

    `reflection`: tell strangers the services' messages, for tools such as grpcurl.
    """
    door = door or Door(DoorLimits(), time.monotonic)
    server = grpc.aio.server(
        interceptors=(
            StreamInterceptor("/grpc.reflection." if reflection else None),
            ErrorInterceptor(),
            AddressInterceptor(door),
            WorkerAuthInterceptor(secret, service.clock),
            KeyInterceptor(door),
            ParseInterceptor(),
            *([] if tracing is None else [tracing]),
        ),
        options=(
            ("grpc.max_receive_message_length", max_payload_bytes + _ENVELOPE_OVERHEAD_BYTES),
            ("grpc.max_allowed_incoming_connections", max_connections),
            *_PUBLIC_OPTIONS,
        ),
    )
    if reflection:
        from grpc_reflection.v1alpha.reflection import SERVICE_NAME, enable_server_reflection

        enable_server_reflection((_WORKER_SERVICE, SERVICE_NAME), server)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, server)
    return await _start(server, host, port, "server.grpc_port", (_WORKER_SERVICE,), tls)


async def serve_trainer(
    service: TrainerService,
    *,
    token: str,
    host: str,
    port: int,
    tls: ServerTls | None = None,
    tracing: grpc.aio.ServerInterceptor | None = None,
) -> Listener:
    """The private listener."""
    server = grpc.aio.server(
        interceptors=(
            StreamInterceptor(),
            ErrorInterceptor(),
            TrainerAuthInterceptor(token),
            ParseInterceptor(),
            *([] if tracing is None else [tracing]),
        ),
        options=(
            ("grpc.max_receive_message_length", _TRAINER_MESSAGE_BYTES),
            ("grpc.max_send_message_length", _TRAINER_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),
        ),
    )
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(service, server)
    return await _start(server, host, port, "server.trainer_port", ("rollswarm.v1.TrainerService",), tls)


async def _start(
    server: grpc.aio.Server, host: str, port: int, field: str, services: Sequence[str], tls: ServerTls | None
) -> Listener:
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    for name in ("", *services):
        await health.set(name, health_pb2.HealthCheckResponse.SERVING)
    try:
        address = f"{host}:{port}"
        bound = (
            server.add_insecure_port(address)
            if tls is None
            else server.add_secure_port(address, tls.grpc_credentials())
        )
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise UserError(f"cannot listen on {host}:{port} ({field}): the port is in use or not ours; choose another")
    await server.start()
    return Listener(server, bound)
