"""What every call passes through, in this order: streams are refused, errors become statuses, the address's limits, a token
names the caller, the caller's limits, and only then is the message parsed. Whoever asks too much costs no parsing.

An error of ours never shows a traceback to a client: it is logged with the method and answered as INTERNAL.
"""

from __future__ import annotations

import abc
import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc

from coordinator import tokens
from coordinator.limits import Door, address_group
from protocol.errors import BadSignature, Busy, OurFault, RollswarmError, UserError, WorkerFault
from protocol.rollout import RejectionReason
from protocol.wire import check_storable

log = logging.getLogger(__name__)

# The authenticated worker's key id, while one of its calls is served.
caller: ContextVar[str] = ContextVar("caller")

REASON_METADATA = "rollswarm-reason"
RETRY_METADATA = "rollswarm-retry-after-ms"
_OURS = "/rollswarm.v1."
_LONGEST_CALL_S = 90.0  # a long poll takes 30; whatever the client's own deadline, nothing is held longer
_OPEN_METHODS = frozenset({"GetChallenge", "Register"})

Handler = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]


class AdaptingInterceptor(grpc.aio.ServerInterceptor, abc.ABC):
    """Gives each method another handler, made once: handlers never change."""

    def __init__(self) -> None:
        self._handlers: dict[str, Any] = {}  # as many as there are methods

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        known = self._handlers.get(method)
        if known is not None:
            return known
        handler = await continuation(handler_call_details)
        if handler is not None:
            handler = self._handlers[method] = self.adapt(method, handler)
        return handler

    @abc.abstractmethod
    def adapt(self, method: str, handler: Any) -> Any:
        """The handler that serves this method."""


class UnaryInterceptor(AdaptingInterceptor):
    """Wraps every unary method's behaviour with `call`."""

    async def call(self, method: str, behaviour: Handler, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return await behaviour(request, context)

    def adapt(self, method: str, handler: Any) -> Any:
        return handler if handler.unary_unary is None else self.wrap(method, handler)

    def wrap(self, method: str, handler: Any) -> Any:
        """The handler with `call` around it."""

        async def wrapped(request: Any, context: grpc.aio.ServicerContext) -> Any:
            return await self.call(method, handler.unary_unary, request, context)

        return grpc.unary_unary_rpc_method_handler(
            wrapped,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


class ErrorInterceptor(UnaryInterceptor):
    """Turns errors into statuses: whose fault it is decides the code."""

    async def call(self, method: str, behaviour: Handler, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await behaviour(request, context)
        except WorkerFault as fault:
            code = grpc.StatusCode.FAILED_PRECONDITION
            if isinstance(fault, BadSignature):
                code = grpc.StatusCode.UNAUTHENTICATED
            elif fault.reason == RejectionReason.FORM:
                code = grpc.StatusCode.INVALID_ARGUMENT
            elif "banned" in fault.detail:
                code = grpc.StatusCode.PERMISSION_DENIED
            await context.abort(code, fault.detail, ((REASON_METADATA, fault.reason),))
        except UserError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except Busy as busy:
            after = ((RETRY_METADATA, str(int(busy.retry_after_s * 1000) + 1)),)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(busy), after)
        except (grpc.aio.AbortError, RollswarmError, Exception) as error:
            if isinstance(error, grpc.aio.AbortError):
                raise
            log.exception("a call failed by our own fault", extra={"action": "internal_error", "method": method})
            await context.abort(grpc.StatusCode.INTERNAL, "the coordinator failed; it is not your fault, try again")


class AddressInterceptor(UnaryInterceptor):
    """The limits of the address that calls, and the longest time that any call is held."""

    def __init__(self, door: Door) -> None:
        super().__init__()
        self._door = door

    async def call(self, method: str, behaviour: Handler, request: Any, context: grpc.aio.ServicerContext) -> Any:
        registers = method.rpartition("/")[2] in _OPEN_METHODS
        with self._door.address(address_group(peer_address(context.peer())), registers=registers):
            try:
                async with asyncio.timeout(_LONGEST_CALL_S) as allowed:
                    return await behaviour(request, context)
            except TimeoutError:
                if not allowed.expired():
                    raise
                raise OurFault(f"{method} took longer than {_LONGEST_CALL_S:.0f} s") from None


class KeyInterceptor(UnaryInterceptor):
    """The limits of the key that calls, once its token has been checked."""

    def __init__(self, door: Door) -> None:
        super().__init__()
        self._door = door

    async def call(self, method: str, behaviour: Handler, request: Any, context: grpc.aio.ServicerContext) -> Any:
        key_id = caller.get("")
        if not key_id:
            return await behaviour(request, context)
        with self._door.key(key_id):
            return await behaviour(request, context)


class ParseInterceptor(UnaryInterceptor):
    """The innermost: those around it see bytes. What is no message of the method is the caller's mistake, also of a method that
    is not ours (health)."""

    def wrap(self, method: str, handler: Any) -> Any:
        async def parsed(raw: bytes, context: grpc.aio.ServicerContext) -> Any:
            try:
                request = handler.request_deserializer(raw)
            except Exception:
                raise WorkerFault(RejectionReason.FORM, "this is no message of the method that was called") from None
            check_storable(request)
            return await handler.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(
            parsed, request_deserializer=None, response_serializer=handler.response_serializer
        )


class StreamInterceptor(AdaptingInterceptor):
    """Refuses streams, which none of the others looks at: health's `Watch`, of which clients take UNIMPLEMENTED for healthy.
    `served`: the prefix of methods that may stream."""

    def __init__(self, served: str | None = None) -> None:
        super().__init__()
        self._served = served

    def adapt(self, method: str, handler: Any) -> Any:
        if handler.unary_unary is not None or (self._served is not None and method.startswith(self._served)):
            return handler
        return grpc.unary_unary_rpc_method_handler(_refuse_stream)


async def _refuse_stream(raw: bytes, context: grpc.aio.ServicerContext) -> Any:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server serves no streams")


class WorkerAuthInterceptor(UnaryInterceptor):
    """Every worker method but the two that register needs a bearer token."""

    def __init__(self, secret: bytes, clock: Callable[[], Awaitable[float]]) -> None:
        super().__init__()
        self._secret = secret
        self._clock = clock

    async def call(self, method: str, behaviour: Handler, request: Any, context: grpc.aio.ServicerContext) -> Any:
        if not method.startswith(_OURS) or method.rpartition("/")[2] in _OPEN_METHODS:
            return await behaviour(request, context)
        reset = caller.set(tokens.check_token(self._secret, bearer(context), await self._clock()))
        try:
            return await behaviour(request, context)
        finally:
            caller.reset(reset)


class TrainerAuthInterceptor(UnaryInterceptor):
    """The private listener takes one shared token."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token.encode()

    async def call(self, method: str, behaviour: Handler, request: Any, context: grpc.aio.ServicerContext) -> Any:
        if method.startswith(_OURS) and not hmac.compare_digest(bearer(context).encode(), self._token):
            raise BadSignature("the trainer token is wrong: pass the run's trainer.token")
        return await behaviour(request, context)


def peer_address(peer: str) -> str:
    """The address part of gRPC's peer string ("ipv4:127.0.0.1:5000" → "127.0.0.1")."""
    kind, _, rest = peer.partition(":")
    return rest.rpartition(":")[0] if kind in ("ipv4", "ipv6") else peer[:64]


def bearer(context: grpc.aio.ServicerContext) -> str:
    """The token of `authorization: Bearer …`, or "" if there is none."""
    for key, value in context.invocation_metadata() or ():
        if key == "authorization" and isinstance(value, str):
            return value.removeprefix("Bearer ")
    return ""
