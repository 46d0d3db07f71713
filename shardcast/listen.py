"""Accepts connections within limits: so many in all, and so many from one address."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterable

from aiohttp import web

from protocol.errors import UserError
from shardcast.config import ServerLimits

log = logging.getLogger("shardcast")

_BACKLOG = 512
_PAUSE_S = 0.2  # after the system refused another socket

OnRefused = Callable[[str], None]


@contextlib.asynccontextmanager
async def listening(
    app: web.Application, host: str, port: int, limits: ServerLimits, on_refused: OnRefused = lambda reason: None
) -> AsyncIterator[str]:
    """Serve while the context lasts; yields the base URL. `on_refused` hears why a connection was closed at once.

    Raises UserError if the address can't be bound.
    """
    runner = web.AppRunner(
        app,
        access_log=None,
        keepalive_timeout=limits.keepalive_s,
        shutdown_timeout=limits.shutdown_s,
        max_line_size=4096,
        max_field_size=4096,
    )
    await runner.setup()
    try:
        with contextlib.closing(_bind(host, port)) as bound:
            assert runner.server is not None
            accepting = asyncio.create_task(_accept(bound, runner.server, limits, on_refused))
            try:
                yield _url_of(bound)
            finally:
                accepting.cancel()
                await asyncio.gather(accepting, return_exceptions=True)
    finally:
        await runner.cleanup()


def refusal(address: str, connected: Iterable[str], limits: ServerLimits) -> str | None:
    """Why a connection from an address is one too many, or None if it isn't. `connected`: the others' addresses."""
    others = list(connected)
    if len(others) >= limits.max_connections:
        return "total"
    mine = party(address)
    if sum(party(other) == mine for other in others) >= limits.max_connections_per_address:
        return "address"
    return None


def party(address: str) -> str:
    """What counts as one address: an IPv4 address, or an IPv6 network of 64 bits, which one host owns as a whole."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)


async def _accept(bound: socket.socket, server: web.Server, limits: ServerLimits, on_refused: OnRefused) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, peer = await loop.sock_accept(bound)
        except OSError as error:  # out of file descriptors or memory: those in use are served on
            log.error("can't accept a connection: %s", error.strerror, extra={"action": "accept"})
            await asyncio.sleep(_PAUSE_S)
            continue
        reason = refusal(str(peer[0]), _addresses(server), limits)
        if reason is not None:
            connection.close()
            on_refused(reason)
            continue
        try:
            await loop.connect_accepted_socket(server, connection)
        except OSError:  # it went away already
            connection.close()


def _addresses(server: web.Server) -> Iterable[str]:
    for handler in server.connections:
        transport = handler.transport
        peer = None if transport is None else transport.get_extra_info("peername")
        yield str(peer[0]) if peer else "?"


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        bound = socket.socket(family, kind)
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(f"can't listen on {host}:{port}: {error}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(_BACKLOG)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise UserError(f"can't listen on {host}:{port}: {error.strerror}; choose another --port or --host") from None
    return bound


def _url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
