"""What an origin or relay offers to clients that swap a version among themselves.

GET  /v1/torrents/{version}        the torrent, whose info-hash the signed manifest names; immutable
POST /v1/peers/{version}           {"port": P or null} → {"peers": [[address, port], …], "again_s": S}
POST /v1/next/{version}?wait=S&as=NAME  a bitmap of wanted shards → one of them, that nobody else was given (`Handout`), its
                                   index in `X-Shardcast-Shard`; 204 when none came within S seconds

The server itself speaks no BitTorrent: it gives each shard to one client, as soon as it has it, and clients swap.
Few shards are sent at a time, so that the first is whole, and goes from client to client, while the next is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from protocol.manifest import MAX_VERSION, Manifest
from shardcast import bits
from shardcast.blob_manifest import swapped
from shardcast.catalog import Catalog
from shardcast.handout import Handout
from shardcast.peer_book import PeerBook
from shardcast.pulse import Pulse
from shardcast.server import IMMUTABLE, ShardcastApp, error_response
from shardcast.sources import SERVER_HEADER, SHARD_HEADER, NotYet

_MAX_VERSIONS = 16
_MAX_WAIT_S = 25.0
_MAX_ANNOUNCE_BYTES = 1024
_MAX_NAME = 32
_READ_TIMEOUT_S = 10.0
_AGAIN_S = 4.0
_PEERS_PER_AGAIN_S = 50  # with more peers each announces more rarely
_SENDING = 8  # shards handed out at a time
_LINGER_S = 2.0  # who was given a shard waits for the next: a relay counts as busy with clients in between, too
_NAP_S = 1.0  # whoever waits looks again at least this often
_SLOW_S = 3.0  # who takes longer no longer counts as being sent to: slow clients hold nobody up


@dataclass(slots=True)
class Given:
    """The shards that are swapped of one version, as far as they are here, and what was given of them."""

    manifest: Manifest
    handout: Handout = field(default_factory=Handout)
    here: int = 0
    epoch: str = ""
    known: int = 0


class PeerService:
    """Routes over an application's catalog."""

    def __init__(
        self,
        app: ShardcastApp,
        *,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._book = PeerBook()
        self._given: dict[int, Given] = {}
        self._slots = Slots(_SENDING, _SLOW_S)
        self._rng = rng or random.Random()
        self._clock = clock

    def add_to(self, application: web.Application) -> None:
        """Offer the routes."""
        application.router.add_get("/v1/torrents/{version}", self._torrent)
        application.router.add_post("/v1/peers/{version}", self._peers)
        application.router.add_post("/v1/next/{version}", self._next)

    @property
    def _name(self) -> dict[str, str]:
        return {SERVER_HEADER: self._catalog.server_id}

    @property
    def _catalog(self) -> Catalog:
        return self._app.catalog

    async def _torrent(self, request: web.Request) -> web.Response:
        version = _version(request)
        if version is None or self._catalog.manifest(version) is None:
            return _not_yet()
        try:
            body = await self._catalog.torrent(version)
        except NotYet:
            return _not_yet()
        if body is None:
            return error_response(404, "there is no torrent of this version here")
        headers = {"Cache-Control": IMMUTABLE, "Content-Type": "application/x-bittorrent"}
        return web.Response(body=body, headers=headers)

    async def _peers(self, request: web.Request) -> web.Response:
        version = _version(request)
        if version is None or self._catalog.manifest(version) is None:
            return _not_yet()
        try:
            port = _port(await _read(request, _MAX_ANNOUNCE_BYTES))
        except ValueError as error:
            return error_response(400, str(error))
        if request.remote is None:
            return error_response(400, "you have no address")
        others = self._book.announce(version, request.remote, port, self._clock(), self._rng)
        self._book.keep(self._current())
        again = max(_AGAIN_S, self._book.count(version) / _PEERS_PER_AGAIN_S)
        body = {"peers": [[each.address, each.port] for each in others], "again_s": again}
        return web.json_response(body, headers={"Cache-Control": "no-store"})

    async def _next(self, request: web.Request) -> web.StreamResponse:
        version = _version(request)
        found = None if version is None else self._catalog.manifest(version)
        if version is None or found is None:
            return _not_yet()
        manifest = swapped(found)
        try:
            wanted = int.from_bytes(await _read(request, len(manifest.shards) // 8 + 1), "little")
            wait_s = float(request.query.get("wait", "0"))
            if math.isnan(wait_s):
                raise ValueError("wait is a number of seconds")
        except ValueError as error:
            return error_response(400, str(error))
        given = self._of(version, manifest)
        asker = f"{request.remote} {request.query.get('as', '')[:_MAX_NAME]}"
        taken = await self._take(given, asker, wanted, min(max(wait_s, 0.0), _MAX_WAIT_S))
        if taken is None:
            return web.Response(status=204, headers={"Cache-Control": "no-store", **self._name})
        index, slot = taken
        serving = contextlib.ExitStack()
        serving.enter_context(self._catalog.manners.serving_client())
        try:
            return await self._send(request, given, index)
        finally:
            self._slots.vacate(slot)
            asyncio.get_running_loop().call_later(_LINGER_S, serving.close)

    async def _take(self, given: Given, asker: str, wanted: int, wait_s: float) -> tuple[int, int] | None:
        """The shard to give, and the slot to send it in; None if there was none in time."""
        deadline = self._clock() + wait_s
        await self._look(given, 0.0)
        while True:
            now = self._clock()
            index = given.handout.take(asker, given.here, wanted, now) if self._slots.free else None
            if index is not None:
                return index, self._slots.occupy()
            if now >= deadline or self._catalog.closed:
                return None
            if self._slots.free:
                free = given.handout.next_free(given.here, wanted, now)
                await self._look(given, min(deadline - now, _NAP_S, math.inf if free is None else free + 0.001))
            else:
                await self._slots.wait_free(deadline - now)

    async def _look(self, given: Given, wait_s: float) -> None:
        """Learn what is here by now, waiting for news if there is none."""
        if given.here == bits.full(len(given.manifest.shards)):
            await self._catalog.changed.wait_until(lambda: self._catalog.closed, wait_s)
            return
        have = await self._catalog.have(given.manifest.total_digest, given.epoch, given.known, wait_s)
        if have is None:
            return
        if have.complete:
            given.here = bits.full(len(given.manifest.shards))
        elif (have.epoch, have.after) == (given.epoch, given.known) or have.epoch != given.epoch:
            known = given.here if have.epoch == given.epoch else 0
            given.here, given.epoch, given.known = known | bits.of(have.added), have.epoch, have.next

    async def _send(self, request: web.Request, given: Given, index: int) -> web.StreamResponse:
        digest = given.manifest.shards[index].digest
        whole = False
        try:
            shard = await self._catalog.open_shard(digest, 0.0)
            if shard is None:
                return error_response(404, "the version is no longer here")
            try:
                response = await self._app.send_whole(request, digest, shard, {SHARD_HEADER: str(index), **self._name})
                whole = response.status == 200
                return response
            finally:
                shard.close()
        except NotYet:
            return error_response(503, "this shard is on its way here; ask again", 1)
        finally:
            if not whole:
                given.handout.give_back(index)

    def _of(self, version: int, manifest: Manifest) -> Given:
        given = self._given.get(version)
        if given is None:
            while len(self._given) >= _MAX_VERSIONS:
                del self._given[min(self._given)]
            given = self._given[version] = Given(manifest)
        return given

    def _current(self) -> set[int]:
        """The versions that a client may ask about."""
        return {version for version in self._book.versions if self._catalog.manifest(version) is not None}


class Slots:
    """At most `most` shards are being sent; one that takes longer than `slow_s` no longer counts."""

    def __init__(self, most: int, slow_s: float) -> None:
        self._most = most
        self._slow_s = slow_s
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._last = 0
        self._freed = Pulse()

    @property
    def free(self) -> bool:
        """Whether another may be sent."""
        return len(self._timers) < self._most

    def occupy(self) -> int:
        """Take a slot; returns its number."""
        self._last += 1
        self._timers[self._last] = asyncio.get_running_loop().call_later(self._slow_s, self.vacate, self._last)
        return self._last

    def vacate(self, slot: int) -> None:
        """The slot is free again, if it wasn't already."""
        timer = self._timers.pop(slot, None)
        if timer is not None:
            timer.cancel()
            self._freed.beat()

    async def wait_free(self, wait_s: float) -> None:
        """Return when one more may be sent, or after `wait_s`."""
        await self._freed.wait_until(lambda: self.free, wait_s)


def _not_yet() -> web.Response:
    """A version that is not here may be on its way."""
    response = error_response(503, "this version is not here; ask again", 1)
    response.headers["X-Shardcast"] = "not-yet"
    return response


async def _read(request: web.Request, most: int) -> bytes:
    """The body. Raises ValueError if it is longer than `most` bytes."""
    if request.content_length is None or request.content_length > most:
        raise ValueError(f"at most {most} bytes with their length announced are due")
    try:
        async with asyncio.timeout(_READ_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise ValueError("the body didn't come in time") from None
    except (web.RequestPayloadError, HttpProcessingError, ConnectionError):
        raise ValueError("the body is broken: its encoding or length is not what it says") from None


def _version(request: web.Request) -> int | None:
    text = request.match_info["version"]
    valid = text.isascii() and text.isdigit() and len(text) <= 16 and int(text) <= MAX_VERSION
    return int(text) if valid else None


def _port(body: bytes) -> int | None:
    """The port that an announcement names. Raises ValueError."""
    try:
        port = json.loads(body)["port"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError('an announcement reads {"port": P} with a number or null') from None
    if port is not None and (not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536):
        raise ValueError("a port is a number from 1 to 65535, or null")
    return port
