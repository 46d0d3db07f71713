"""One gRPC channel to a coordinator: encrypted or not, tried again while the coordinator is away or busy, and it says why.

Endpoints are `https://host:port` (TLS) or `host:port` (plaintext), as the run's terms and the run file write them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc

from protocol.errors import BadSignature, OurFault, UserError, WorkerFault
from protocol.rollout import RejectionReason
from protocol.trust import Trust, client_context, examine, speaks_tls

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_MESSAGE_BYTES = 256 << 20
_BACKOFF_START_S = 0.25
_BACKOFF_MAX_S = 15.0
# UNKNOWN: what a proxy before it answers for it, by HTTP; it never does itself.
_AWAY = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)
REASON_METADATA = "rollswarm-reason"
RETRY_METADATA = "rollswarm-retry-after-ms"
_RETRY_MAX_S = 60.0


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


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a gRPC listener is."""

    host: str
    port: int
    encrypted: bool

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """Raises UserError if it is none."""
    encrypted = text.startswith("https://")
    rest = text.removeprefix("https://").removeprefix("http://")
    host, _, port = rest.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536 or "/" in rest:
        raise UserError(f"{text!r:.200} is no gRPC endpoint: it must be host:port, or https://host:port for TLS")
    return Endpoint(host.strip("[]"), int(port), encrypted)


class Channel:
    """A channel to one of the endpoints, with retries for as long as the coordinator is away, or until told to `stop`.

    `trust`: how its certificates are believed; None: by the machine's own list of authorities.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        on_outage: Callable[[str], None],
        stop: asyncio.Event | None = None,
        trust: Trust | None = None,
    ) -> None:
        if not endpoints:
            raise UserError("the run's terms name no gRPC endpoint")
        self._endpoints = [parse_endpoint(each) for each in endpoints]
        self._ca_pem = None if trust is None else trust.ca_pem
        if len({each.encrypted for each in self._endpoints}) > 1:
            raise UserError("some gRPC endpoints are encrypted and some are not: tell the run's operator")
        self.channel = self._open()
        self._on_outage = on_outage
        self._stop = stop

    def _open(self) -> grpc.aio.Channel:
        first = self._endpoints[0]
        several = len(self._endpoints) > 1
        target = "ipv4:" + ",".join(each.address for each in self._endpoints) if several else first.address
        if not first.encrypted:
            return grpc.aio.insecure_channel(target, options=_OPTIONS)
        # Replicas behind several addresses have one certificate, for the first one's name.
        name = (("grpc.ssl_target_name_override", first.host),) if several else ()
        credentials = grpc.ssl_channel_credentials(self._ca_pem or _system_roots())
        return grpc.aio.secure_channel(target, credentials, options=(*_OPTIONS, *name))

    async def call(self, invoke: Callable[[], Awaitable[T]], *, patience_s: float | None) -> T:
        """Invoke until it answers. Raises WorkerFault or UserError if refused, OurFault when patience ends."""
        backoff, begun, told = Backoff(), time.monotonic(), False
        while True:
            try:
                return await invoke()
            except grpc.aio.AioRpcError as error:
                wait = retry_after(error)
                if wait is None and error.code() not in _AWAY:
                    raise refusal(error) from None
                if patience_s is not None and time.monotonic() - begun >= patience_s:
                    why = "" if wait is not None else await self._why()
                    state = "away" if wait is None else "busy"
                    raise OurFault(f"the coordinator is {state}: {why or error.details()}") from None
                if self._stop is not None and self._stop.is_set():
                    raise OurFault("stopped while the coordinator is away: start again to go on from here") from None
                if not told:
                    self._on_outage(await self._outage(error, wait))
                    told = True
            if wait is None:
                await backoff.pause()
            else:
                await asyncio.sleep(random.uniform(wait, 1.5 * wait + 0.05))  # apart from the others that it sent away

    async def _outage(self, error: grpc.aio.AioRpcError, wait: float | None) -> str:
        if wait is not None:
            return f"the coordinator is busy ({error.details()}); asking again when it says"
        return f"the coordinator is away ({await self._why() or error.code().name.lower()}); retrying with back-off"

    async def _why(self) -> str:
        """What TLS has to do with an outage; "" if nothing."""
        first = self._endpoints[0]
        if first.encrypted:
            return await examine(first.host, first.port, client_context(self._ca_pem, alpn=("h2",)))
        if await speaks_tls(first.host, first.port):
            return f"{first.address} speaks TLS: give it as https://{first.address}"
        return ""


def retry_after(error: grpc.aio.AioRpcError) -> float | None:
    """Seconds after which a coordinator that is busy wants to be asked again; None if it is not that."""
    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
        return None
    told = next((str(value) for key, value in error.trailing_metadata() or () if key == RETRY_METADATA), "")
    return min(int(told) / 1000, _RETRY_MAX_S) if told.isascii() and told.isdigit() else None


def refusal(error: grpc.aio.AioRpcError) -> Exception:
    """The error that a refused call stands for."""
    reason = next((value for key, value in error.trailing_metadata() or () if key == REASON_METADATA), None)
    detail = error.details() or error.code().name
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return BadSignature(detail)
    if reason is not None:
        return WorkerFault(str(reason), detail)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:  # gRPC itself refused the message, and always will
        return WorkerFault(RejectionReason.FORM, detail)
    return UserError(f"the coordinator refused: {detail}")


def _system_roots() -> bytes | None:
    """The machine's list of authorities, so that gRPC believes whom HTTP believes; None: gRPC's own list."""
    path = ssl.get_default_verify_paths().cafile
    return Path(path).read_bytes() if path and Path(path).exists() else None
