from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from coordinator import tokens
from coordinator.channel import retry_after
from coordinator.interceptors import (
    REASON_METADATA,
    AddressInterceptor,
    ErrorInterceptor,
    KeyInterceptor,
    ParseInterceptor,
    StreamInterceptor,
    TrainerAuthInterceptor,
    WorkerAuthInterceptor,
    caller,
)
from coordinator.limits import Door, DoorLimits, Rate
from protocol.errors import BadSignature, OurFault, UserError, WorkerFault
from tests.factories import SECRET, make_identity

NOW = 1_800_000_000.0
ALICE = make_identity(11).key_id
Call = Callable[..., Awaitable[bytes]]


async def clock() -> float:
    return NOW


class Echo(grpc.GenericRpcHandler):
    """Any method: `behaviour` decides, "caller" answers who calls."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def service(self, details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._answer)

    async def _answer(self, request: bytes, context: Any) -> bytes:
        if self.error is not None:
            raise self.error
        return caller.get("nobody").encode()


@asynccontextmanager
async def serving(add: Callable[[Any], object], *interceptors: Any) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server behind these interceptors, that `add` put its methods into."""
    server = grpc.aio.server(interceptors=interceptors)
    add(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Callable[..., Awaitable[tuple[Echo, Call]]]]:
    opened = AsyncExitStack()

    async def _serve(*interceptors: Any) -> tuple[Echo, Call]:
        echo = Echo()
        channel = await opened.enter_async_context(
            serving(lambda server: server.add_generic_rpc_handlers((echo,)), *interceptors)
        )

        async def call(method: str = "/rollswarm.v1.WorkerService/AcquireLeases", token: str | None = None) -> bytes:
            metadata = () if token is None else (("authorization", f"Bearer {token}"),)
            return bytes(await channel.unary_unary(method)(b"", metadata=metadata, timeout=10))

        return echo, call

    async with opened:
        yield _serve


async def refusal(call: Awaitable[bytes]) -> tuple[grpc.StatusCode, str, str | None]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    metadata = dict(caught.value.trailing_metadata() or ())
    return caught.value.code(), caught.value.details() or "", metadata.get(REASON_METADATA)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (WorkerFault("lease", "the lease is expired"), grpc.StatusCode.FAILED_PRECONDITION, "lease"),
        (WorkerFault("form", "too long"), grpc.StatusCode.INVALID_ARGUMENT, "form"),
        (WorkerFault("lease", "this key is banned: spam"), grpc.StatusCode.PERMISSION_DENIED, "lease"),
        (BadSignature("whose?"), grpc.StatusCode.UNAUTHENTICATED, "signature"),
        (UserError("batch 0 is acknowledged"), grpc.StatusCode.FAILED_PRECONDITION, None),
    ],
)
async def test_whose_fault_it_is_decides_the_status(
    serve: Any, error: Exception, code: grpc.StatusCode, reason: str | None
) -> None:
    echo, call = await serve(ErrorInterceptor())
    echo.error = error
    detail = error.detail if isinstance(error, WorkerFault) else str(error)
    assert await refusal(call()) == (code, detail, reason)


@pytest.mark.parametrize("error", [ZeroDivisionError("secret path /etc"), OurFault("the disk is full")])
async def test_our_own_failures_are_logged_and_never_shown(
    serve: Any, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    echo, call = await serve(ErrorInterceptor())
    echo.error = error
    with caplog.at_level(logging.ERROR):
        code, detail, _ = await refusal(call())
    assert code is grpc.StatusCode.INTERNAL
    assert str(error) not in detail
    assert any(record.exc_info and record.exc_info[1] is error for record in caplog.records)


async def test_a_token_names_the_caller(serve: Any) -> None:
    _, call = await serve(ErrorInterceptor(), WorkerAuthInterceptor(SECRET, clock))
    assert await call(token=tokens.make_token(SECRET, ALICE, NOW)) == ALICE.encode()


@pytest.mark.parametrize(
    "token", [None, "", "forged", tokens.make_token(bytes(32), ALICE, NOW), tokens.make_token(SECRET, ALICE, NOW - 901)]
)
async def test_without_a_good_token_no_call_gets_through(serve: Any, token: str | None) -> None:
    _, call = await serve(ErrorInterceptor(), WorkerAuthInterceptor(SECRET, clock))
    assert (await refusal(call(token=token)))[0] is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("method", ["GetChallenge", "Register"])
async def test_registration_and_health_need_no_token(serve: Any, method: str) -> None:
    _, call = await serve(ErrorInterceptor(), WorkerAuthInterceptor(SECRET, clock))
    assert await call(f"/rollswarm.v1.WorkerService/{method}") == b"nobody"
    assert await call("/grpc.health.v1.Health/Check") == b"nobody"


async def test_the_private_listener_takes_one_token(serve: Any) -> None:
    _, call = await serve(ErrorInterceptor(), TrainerAuthInterceptor("right"))
    method = "/rollswarm.v1.TrainerService/PullGroups"
    assert await call(method, token="right") == b"nobody"
    for wrong in (None, "", "wrong", "right "):
        code, detail, _ = await refusal(call(method, token=wrong))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert "trainer.token" in detail


async def test_too_much_of_a_key_is_turned_away_before_it_is_parsed(serve: Any) -> None:
    door = Door(DoorLimits(key=Rate(0.001, 1.0)), lambda: 0.0)
    _, call = await serve(ErrorInterceptor(), WorkerAuthInterceptor(SECRET, clock), KeyInterceptor(door))
    token = tokens.make_token(SECRET, ALICE, NOW)
    assert await call(token=token) == ALICE.encode()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(token=token)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert retry_after(refused.value) == pytest.approx(60.0)  # what is told is longer: nobody waits for hours


async def test_an_address_is_limited_before_its_token_is_looked_at(serve: Any) -> None:
    door = Door(DoorLimits(calls=0), lambda: 0.0)
    _, call = await serve(ErrorInterceptor(), AddressInterceptor(door), WorkerAuthInterceptor(SECRET, clock))
    assert (await refusal(call()))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


class Picky(grpc.GenericRpcHandler):
    """A method whose message is never parsed well."""

    def service(self, details: Any) -> Any:
        def parse(raw: bytes) -> bytes:
            raise ValueError("no message")

        async def answer(request: bytes, context: Any) -> bytes:
            return request

        return grpc.unary_unary_rpc_method_handler(answer, request_deserializer=parse)


async def test_what_is_no_message_is_the_callers_mistake() -> None:
    def add(server: Any) -> None:
        server.add_generic_rpc_handlers((Picky(),))

    async with serving(add, ErrorInterceptor(), ParseInterceptor()) as channel:
        method = channel.unary_unary("/rollswarm.v1.WorkerService/SubmitRollout")
        code, detail, reason = await refusal(method(b"\xff", timeout=10))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and reason == "form" and "no message" in detail


async def test_health_is_answered_as_carefully_as_what_is_ours() -> None:
    add = partial(health_pb2_grpc.add_HealthServicer_to_server, health_aio.HealthServicer())
    async with serving(add, StreamInterceptor(), ErrorInterceptor(), ParseInterceptor()) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        code, detail, _ = await refusal(check(b"\x0a\x02\xff\xff", timeout=10))
        unknown = await refusal(check(b"\x0a\x02hi", timeout=10))
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
        streamed = await refusal(watch(b"\xff", timeout=10).read())
    assert code is grpc.StatusCode.INVALID_ARGUMENT and "no message" in detail
    assert unknown[0] is grpc.StatusCode.NOT_FOUND
    assert streamed[0] is grpc.StatusCode.UNIMPLEMENTED and "no streams" in streamed[1]


async def test_streams_that_are_served_pass() -> None:
    from grpc_reflection.v1alpha import reflection_pb2 as messages
    from grpc_reflection.v1alpha.reflection import SERVICE_NAME, enable_server_reflection

    add = partial(enable_server_reflection, (SERVICE_NAME,))
    async with serving(add, StreamInterceptor("/grpc.reflection."), ErrorInterceptor()) as channel:
        for _ in range(2):  # the second is answered from memory
            call = channel.stream_stream(f"/{SERVICE_NAME}/ServerReflectionInfo")(timeout=10)
            await call.write(messages.ServerReflectionRequest(list_services="").SerializeToString())
            answer = messages.ServerReflectionResponse.FromString(await call.read())
            await call.done_writing()
            assert [each.name for each in answer.list_services_response.service] == [SERVICE_NAME]
