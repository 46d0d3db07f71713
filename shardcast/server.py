"""The HTTP surface that origin and relay share.

GET /v1/head?after=V&wait=S   200 {"version", "manifest_digest"} once the head is above V; 204 when S seconds passed
GET /v1/manifests/{version}   the signed manifest; immutable
GET /v1/shards/{digest}       the bytes; Range, ETag, immutable. `Prefer: wait=S` lets a relay wait for them;
                              503 with `X-Shardcast: not-yet` when they didn't come in time, with `Retry-After` and a
                              reason when nothing more may be sent this month, or too much waits to be sent
GET /v1/keys                  rotations of the trainer's key: {"rotations": [envelope, …]}
GET /v1/have/{total digest}?epoch=E&after=N&wait=S
                              200 which shards of the version are here, from the Nth of list E on (see `have`); 204 when
                              S seconds passed without news
POST /v1/reports              a delta was of no use to a client (see `reports`)
GET /healthz, /metrics, /     JSON, Prometheus text, a page for people
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Middleware

from protocol.manifest import MAX_ENVELOPE_BYTES, MAX_VERSION, Digest, InvalidManifest
from shardcast.asker import FROM_HEADER, Asker, Kind
from shardcast.catalog import Catalog, NotYet, OpenShard
from shardcast.config import MIB, ServerLimits
from shardcast.listen import party
from shardcast.quota import MonthlyQuota
from shardcast.status_page import render_page
from shardcast.uplink import Uplink

log = logging.getLogger("shardcast")

_SLICE_BYTES = MIB
_THROTTLED_SLICE_BYTES = MIB // 8
_BACKLOG_S = 5.0  # who would wait longer for each slice is sent away: clients take 15 s of silence for a fault
IMMUTABLE = "public, max-age=31536000, immutable"
_BACKLOG = "more was asked of this relay at once than it may send; ask another, or again later"
_USED_UP = "this relay sent all that it may this month; ask another"
_NO_STORE = {"Cache-Control": "no-store"}
_PREFER_WAIT = re.compile(r"(?:^|[,;\s])wait=(\d{1,4})")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class ShardcastApp:
    """Handlers over a catalog. `uplink` bounds the bytes of shards sent per second, `quota` those of a month."""

    catalog: Catalog
    limits: ServerLimits
    uplink: Uplink | None = None
    quota: MonthlyQuota | None = None

    def build(self) -> web.Application:
        """The aiohttp application; the origin adds its own route."""
        limit = limit_per_address(self.limits.max_requests_per_address)
        app = web.Application(middlewares=[limit], client_max_size=MAX_ENVELOPE_BYTES)
        app.router.add_get("/v1/head", self._head)
        app.router.add_get("/v1/manifests/{version}", self._manifest)
        app.router.add_get("/v1/shards/{digest}", self._shard)
        app.router.add_get("/v1/keys", self._keys)
        app.router.add_get("/v1/have/{digest}", self._have)
        app.router.add_post("/v1/reports", self.catalog.reports.handle)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/", self._page)
        return app

    async def _head(self, request: web.Request) -> web.Response:
        try:
            after, wait = self._poll_of(request)
        except ValueError:
            return error_response(400, "after is a version number and wait a number of seconds")
        head = await self.catalog.wait_head(after, wait)
        if head is None:
            return web.Response(status=204, headers=_NO_STORE)
        body = {"version": head.version, "manifest_digest": head.manifest_digest}
        return web.json_response(body, headers=_NO_STORE)

    async def _have(self, request: web.Request) -> web.Response:
        try:
            digest = Digest(request.match_info["digest"])
            after, wait = self._poll_of(request)
        except (InvalidManifest, ValueError):
            return error_response(400, "a total digest, after as a whole number and wait in seconds are due")
        epoch = request.query.get("epoch", "")
        have = await self.catalog.have(digest, epoch, max(0, after or 0), wait, _asker(request))
        if have is None:
            return web.Response(status=204, headers=_NO_STORE)
        return web.json_response(have.to_json(), headers=_NO_STORE)

    def _poll_of(self, request: web.Request) -> tuple[int | None, float]:
        """`after` and `wait` of a long poll. Raises ValueError."""
        after = request.query.get("after", "")
        wait = float(request.query.get("wait", "0"))
        if math.isnan(wait):  # a timer at NaN upsets the order of all timers
            raise ValueError
        return (int(after) if after else None), min(max(wait, 0.0), self.limits.head_wait_s)

    async def _manifest(self, request: web.Request) -> web.Response:
        version = request.match_info["version"]
        if not (version.isascii() and version.isdigit() and len(version) <= 16 and int(version) <= MAX_VERSION):
            return error_response(400, "a version is a whole number")
        body = await self.catalog.manifest_json(int(version), _asker(request))
        if body is None:
            return error_response(404, f"version {version} is not here")
        return web.Response(body=body, content_type="application/json", headers={"Cache-Control": IMMUTABLE})

    async def _keys(self, request: web.Request) -> web.Response:
        body = self.catalog.store.keys.to_json()
        return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "public, max-age=5"})

    async def _shard(self, request: web.Request) -> web.StreamResponse:
        try:
            digest = Digest(request.match_info["digest"])
        except InvalidManifest as error:
            return error_response(400, str(error))
        try:
            shard = await self.catalog.open_shard(digest, self._wait_of(request))
        except NotYet:
            response = error_response(503, "this shard is on its way here; ask again", 1)
            response.headers["X-Shardcast"] = "not-yet"
            return response
        if shard is None:
            return error_response(404, f"no version here has the shard {digest}")
        try:
            return await self.send(request, digest, shard)
        finally:
            shard.close()

    def _wait_of(self, request: web.Request) -> float:
        found = _PREFER_WAIT.search(request.headers.get("Prefer", ""))
        return min(float(found.group(1)), self.limits.shard_wait_s) if found else self.limits.shard_wait_s

    async def send(self, request: web.Request, digest: Digest, shard: OpenShard) -> web.StreamResponse:
        """Answer with a shard's bytes, or the range of them that is asked for."""
        headers = _shard_headers(digest)
        if any(tag.value in (digest, "*") for tag in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        try:
            start, stop = byte_range(request, shard.size)
        except ValueError:
            headers["Content-Range"] = f"bytes */{shard.size}"
            return web.Response(status=416, headers=headers)
        if "Range" not in request.headers:
            return await self._send_range(request, shard, 0, shard.size, 200, headers)
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{shard.size}"
        return await self._send_range(request, shard, start, stop, 206, headers)

    async def send_whole(
        self, request: web.Request, digest: Digest, shard: OpenShard, extra: Mapping[str, str]
    ) -> web.StreamResponse:
        """Answer with all of a shard, whatever the request's headers ask for. With status 200 it was sent to its end."""
        headers = {**extra, **_shard_headers(digest)}
        return await self._send_range(request, shard, 0, shard.size, 200, headers)

    async def _send_range(
        self, request: web.Request, shard: OpenShard, start: int, stop: int, status: int, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        refused = self._refuse(request)
        if refused is not None:
            return refused
        response = web.StreamResponse(status=status, headers=headers)
        response.content_length = stop - start
        await response.prepare(request)
        if request.method != "HEAD":
            asker = _asker(request)
            client = self.catalog.manners.serving_client() if asker.kind is not Kind.PEER else contextlib.nullcontext()
            with self.catalog.store.reading(shard.version), client:
                await self._send_file(request, asker, shard, start, stop)
        await response.write_eof()
        return response

    def _refuse(self, request: web.Request) -> web.Response | None:
        """The answer if nothing more may be sent this month, or too much waits to be sent."""
        if self.quota and not self.quota.left_bytes:
            return error_response(503, _USED_UP, self.quota.seconds_to_next_month)
        wait_s = self.uplink.wait_s(_address(request)) if self.uplink else 0.0
        return error_response(503, _BACKLOG, math.ceil(wait_s - _BACKLOG_S)) if wait_s > _BACKLOG_S else None

    async def _send_file(self, request: web.Request, asker: Asker, shard: OpenShard, start: int, stop: int) -> None:
        """Send in slices: each must be taken in time, and each waits for its turn where the bandwidth is bounded."""
        slice_bytes = _THROTTLED_SLICE_BYTES if self.uplink or asker.busy else _SLICE_BYTES
        with os.fdopen(os.dup(shard.descriptor), "rb", buffering=0) as file:
            for at in range(start, stop, slice_bytes):
                count = min(slice_bytes, stop - at)
                if asker.busy:
                    await self.catalog.manners.let_clients_pass(count)
                if self.uplink and not await self.uplink.turn(_address(request), count, lambda: _gone(request)):
                    raise ConnectionResetError("the client went away")
                file.seek(shard.offset + at)
                try:
                    await self._send_slice(request, file, count)
                finally:
                    self._count_sent(asker, count, file.tell() - shard.offset - at)

    async def _send_slice(self, request: web.Request, file: io.FileIO, count: int) -> None:
        """Send `count` bytes from where the file stands, and leave it after the last that was sent."""
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client went away")
        try:
            async with asyncio.timeout(self.limits.send_timeout_s):
                await asyncio.get_running_loop().sendfile(transport, file, file.tell(), count)
        except TimeoutError:
            file.seek(count, os.SEEK_CUR)  # how much went isn't known
            transport.abort()  # a client that doesn't read
            raise ConnectionResetError("the client takes the bytes too slowly") from None

    def _count_sent(self, asker: Asker, count: int, sent: int) -> None:
        """Of a slice of `count` bytes so many were sent."""
        if self.uplink and sent < count:
            self.uplink.give_back(count - sent)
        self.catalog.metrics.count_sent(asker.kind is not Kind.CLIENT, sent)
        if self.quota:
            self.quota.count(sent)
        if asker.kind is not Kind.PEER:
            self.catalog.manners.sent(sent)

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.json_response(self._health(), headers=_NO_STORE)

    def _health(self) -> dict[str, object]:
        health = self.catalog.health()
        if self.quota:
            health["quota_left_bytes"] = self.quota.left_bytes
            if not self.quota.left_bytes:
                health["status"] = _USED_UP
        return health

    async def _metrics(self, request: web.Request) -> web.Response:
        body = self.catalog.metrics.render()
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(text=render_page(self._health()), content_type="text/html")


def _shard_headers(digest: Digest) -> dict[str, str]:
    return {
        "ETag": f'"{digest}"',
        "Cache-Control": IMMUTABLE,
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
    }


def _address(request: web.Request) -> str:
    return party(request.remote or "?")


def _gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _asker(request: web.Request) -> Asker:
    return Asker.parse(request.headers.get(FROM_HEADER))


def limit_per_address(most: int) -> Middleware:
    """Refuse an address that has `most` requests in flight."""
    in_flight: Counter[str] = Counter()

    @web.middleware
    async def limit(request: web.Request, handler: Handler) -> web.StreamResponse:
        address = _address(request)
        if in_flight[address] >= most:
            return error_response(503, "too many requests at once from this address; wait for some to end", 1)
        in_flight[address] += 1
        try:
            return await handler(request)
        finally:
            in_flight[address] -= 1
            if not in_flight[address]:
                del in_flight[address]

    return limit


def error_response(status: int, message: str, retry_after: int | None = None) -> web.Response:
    """An error as JSON, never cached."""
    headers = {"Cache-Control": "no-store"}
    if retry_after is not None:
        headers["Retry-After"] = str(retry_after)
    return web.json_response({"error": message}, status=status, headers=headers)


def byte_range(request: web.Request, size: int) -> tuple[int, int]:
    """Start and stop (exclusive) of what is asked for. Raises ValueError if it can't be satisfied."""
    if "Range" not in request.headers:
        return 0, size
    asked = request.http_range
    start = 0 if asked.start is None else asked.start
    if start < 0:
        return max(0, size + start), size
    stop = size if asked.stop is None else min(asked.stop, size)
    if start >= stop:
        raise ValueError("the range lies outside the shard")
    return start, stop
