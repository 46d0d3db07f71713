"""Several servers share the workers' port, so that calls are taken in side by side; with nobody else's."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.grpc_server import Listener, serve_trainer, serve_workers
from coordinator.service import TrainerService, WorkerService
from demo.presets import Ports
from protocol.errors import UserError
from tests.factories import RUN_ID, SECRET, TEMPERATURE
from tests.stored_run import StoredRun

_SERVICE = "rollswarm.v1.WorkerService"


@contextlib.asynccontextmanager
async def listening(run: StoredRun, port: int, max_connections: int = 16_384) -> AsyncIterator[Listener]:
    listener = await serve_workers(
        run.service(WorkerService),
        secret=SECRET,
        host="127.0.0.1",
        port=port,
        max_payload_bytes=1 << 20,
        max_connections=max_connections,
    )
    try:
        yield listener
    finally:
        await listener.stop(0)


async def is_serving(port: int) -> bool:
    """By a connection of its own."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        request = health_pb2.HealthCheckRequest(service=_SERVICE)
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=20, wait_for_ready=True)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.parametrize("given", [True, False])
async def test_every_connection_is_served_whichever_server_gets_it(run: StoredRun, given: bool) -> None:
    async with listening(run, Ports.free().grpc if given else 0) as listener:
        assert len(listener.servers) == (4 if sys.platform == "linux" else 1)
        assert all(await asyncio.gather(*(is_serving(listener.port) for _ in range(48))))


async def test_a_port_that_another_coordinator_has_is_not_shared_with_it(run: StoredRun) -> None:
    async with listening(run, Ports.free().grpc) as listener:
        with pytest.raises(UserError, match=rf"127\.0\.0\.1:{listener.port} \(server\.grpc_port\): the port is in use"):
            async with listening(run, listener.port):
                pass
        feeding = TrainerService(run.feeding, run_id=RUN_ID, temperature=TEMPERATURE, scheduling=run.scheduling)
        with pytest.raises(UserError, match=r"\(server\.trainer_port\): the port is in use"):
            await serve_trainer(feeding, token="t", host="127.0.0.1", port=listener.port)
        assert await is_serving(listener.port)
    async with listening(run, listener.port) as again:  # free again, at once
        assert await is_serving(again.port)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no port is shared")
async def test_a_port_that_another_coordinator_is_about_to_take_is_left_to_it(run: StoredRun) -> None:
    """Both would find it free, and then share it."""
    port = Ports.free().grpc
    with socket.socket(socket.AF_UNIX) as another:
        another.bind(f"\0rollswarm-port-{port}")
        with pytest.raises(UserError, match="the port is in use"):
            async with listening(run, port):
                pass
    async with listening(run, port):
        with socket.socket(socket.AF_UNIX) as another:
            another.bind(f"\0rollswarm-port-{port}")  # given back


async def test_few_connections_are_counted_by_one_server(run: StoredRun) -> None:
    async with listening(run, 0, max_connections=2) as listener:
        assert len(listener.servers) == 1 and await is_serving(listener.port)
