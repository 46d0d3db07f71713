"""What every call passes through, in this order: errors become statuses, then the caller is known.

An error of ours never shows a traceback to a client: it is logged with the method and answered as INTERNAL.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc

from coordinator import tokens
from protocol.errors import BadSignature, RollswarmError, UserError, WorkerFault
from protocol.rollout import RejectionReason

log = logging.getLogger(__name__)

# The authenticated worker's key id, while one of its calls is served.
caller: ContextVar[str] = ContextVar("caller")

REASON_METADATA = "rollswarm-reason"
_OPEN_METHODS = frozenset({"GetChallenge", "Register"})

Handler = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]


class _UnaryInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every unary method's behaviour with `call`."""

    async def call(self, method: str, behaviour: Handler, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return await behaviour(request, context)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler
        method = handler_call_details.method

        async def wrapped(request: Any, context: grpc.aio.ServicerContext) -> Any:
            return await self.call(method, handler.unary_unary, request, context)

        return grpc.unary_unary_rpc_method_handler(
            wrapped,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


class ErrorInterceptor(_UnaryInterceptor):
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
        except (grpc.aio.AbortError, RollswarmError, Exception) as error:
            if isinstance(error, grpc.aio.AbortError):
                raise
            log.exception("a call failed by our own fault", extra={"action": "internal_error", "method": method})
            await context.abort(grpc.StatusCode.INTERNAL, "the coordinator failed; it is not your fault, try again")


class WorkerAuthInterceptor(_UnaryInterceptor):
    """Every worker method but the two that register needs a bearer token."""

    def __init__(self, secret: bytes, clock: Callable[[], Awaitable[float]]) -> None:
        self._secret = secret
        self._clock = clock

    async def call(self, method: str, behaviour: Handler, request: Any, context: grpc.aio.ServicerContext) -> Any:
        if not method.startswith("/rollswarm.v1.") or method.rpartition("/")[2] in _OPEN_METHODS:
            return await behaviour(request, context)
        reset = caller.set(tokens.check_token(self._secret, bearer(context), await self._clock()))
        try:
            return await behaviour(request, context)
        finally:
            caller.reset(reset)


class TrainerAuthInterceptor(_UnaryInterceptor):
    """The private listener takes one shared token."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def call(self, method: str, behaviour: Handler, request: Any, context: grpc.aio.ServicerContext) -> Any:
        if method.startswith("/rollswarm.v1.") and not hmac.compare_digest(bearer(context).encode(), self._token):
            raise BadSignature("the trainer token is wrong: pass the run's trainer.token")
        return await behaviour(request, context)


def bearer(context: grpc.aio.ServicerContext) -> str:
    """The token of `authorization: Bearer …`, or "" if there is none."""
    for key, value in context.invocation_metadata() or ():
        if key == "authorization" and isinstance(value, str):
            return value.removeprefix("Bearer ")
    return ""
