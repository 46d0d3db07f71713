"""Two gRPC listeners: a public one for workers, a private one for the trainer, each with health checks."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import sys
import time
from collections.abc import Iterator, Sequence
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
# A grpc.aio server takes in one call of each method at a time, by several turns of the event loop: where those are long, a call
# waits longer for being taken in than for its answer. So several servers share the public port, where the system lets them.
_SERVERS = 4
_CONNECTIONS_OF_A_SERVER = 1024  # at least: the system deals them out by chance, and the number of each is bounded
# Nothing that a stranger sends is taken in beyond these. Compressed messages are refused: rollouts hardly shrink, and what
# would grow on our side is a way to fill memory.
_PUBLIC_OPTIONS = (
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
    """Started servers and the port they listen on."""

    servers: tuple[grpc.aio.Server, ...]
    port: int

    async def stop(self, grace_s: float) -> None:
        await asyncio.gather(*(server.stop(grace_s) for server in self.servers))


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
    count = min(_SERVERS, max(1, max_connections // _CONNECTIONS_OF_A_SERVER)) if sys.platform == "linux" else 1

    def make() -> grpc.aio.Server:
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
                ("grpc.max_allowed_incoming_connections", max_connections // count),
                ("grpc.so_reuseport", int(count > 1)),
                *_PUBLIC_OPTIONS,
            ),
        )
        if reflection:
            from grpc_reflection.v1alpha.reflection import SERVICE_NAME, enable_server_reflection

            enable_server_reflection((_WORKER_SERVICE, SERVICE_NAME), server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, server)
        return server

    return await _start([make() for _ in range(count)], host, port, "server.grpc_port", (_WORKER_SERVICE,), tls)


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
    return await _start([server], host, port, "server.trainer_port", ("rollswarm.v1.TrainerService",), tls)


async def _start(
    servers: Sequence[grpc.aio.Server], host: str, port: int, field: str, services: Sequence[str], tls: ServerTls | None
) -> Listener:
    """Let all of these listen on one port; several must have been made to share it."""
    in_use = UserError(f"cannot listen on {host}:{port} ({field}): the port is in use or not ours; choose another")
    shared = len(servers) > 1 and port != 0
    with _alone_at(port) if shared else contextlib.nullcontext(True) as alone:
        # Who may share a port shares it with anyone: whether somebody else has it, only one who may not finds out.
        if not alone or (shared and _is_taken(host, port)):
            raise in_use
        bound = port
        for server in servers:
            bound = _bind(server, f"{host}:{bound}", tls)
            if bound == 0:
                raise in_use
    for server in servers:
        health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        for name in ("", *services):
            await health.set(name, health_pb2.HealthCheckResponse.SERVING)
        await server.start()
    return Listener(tuple(servers), bound)


def _bind(server: grpc.aio.Server, address: str, tls: ServerTls | None) -> int:
    """The port, 0 if it can't be had."""
    with contextlib.suppress(RuntimeError):
        if tls is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, tls.grpc_credentials()))
    return 0


@contextlib.contextmanager
def _alone_at(port: int) -> Iterator[bool]:
    """Whether no other coordinator on this machine is about to take this port; none is until the end of the block.

    By a name that the system gives to one process at a time, and forgets with it (Linux).
    """
    with socket.socket(socket.AF_UNIX) as name:
        try:
            name.bind(f"\0rollswarm-port-{port}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            yield False
        else:
            yield True


def _is_taken(host: str, port: int) -> bool:
    """Whether somebody has this port, as a socket finds out that shares with nobody."""
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as alone:
                # Connections that have just ended count not.
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                alone.bind(address)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False
