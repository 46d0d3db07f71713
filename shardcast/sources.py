"""HTTP to one source, which may be slow, broken or hostile.

Two kinds of fault: `Misbehaved` is proof (the source answered what no honest one would: a redirect, a wrong length,
an encoded body, too many bytes), `Unavailable` may pass (down, slow, not found). Nothing is buffered beyond
`_BATCH_BYTES` plus the socket's buffer, and no answer is trusted here: digests and signatures are the caller's.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp

from protocol.errors import SourceFault
from protocol.manifest import MAX_VERSION, Digest, InvalidManifest, SignedEnvelope, envelope_from_json
from protocol.rotation import MAX_CHAIN_BYTES, InvalidRotation, chain_from_json
from protocol.trust import why_unreachable
from shardcast.asker import CLIENT, Asker, Kind
from shardcast.config import MIB, ClientLimits
from shardcast.have import MAX_BYTES as MAX_HAVE_BYTES
from shardcast.have import Have, parse_have
from shardcast.peer_list import Peers, parse_peers

_BATCH_BYTES = MIB
_WORTHWHILE_BYTES = 128 * 1024  # a read that brings so many is worth its overhead
_NAP_MIN_S, _NAP_MAX_S = 0.002, 0.02
_SOCKET_BUFFER_BYTES = MIB
_HEAD_MAX_BYTES = 4096
_PEERS_MAX_BYTES = 64 * 1024
_MAX_ID = 64
_WHY_BYTES = 1024
_RETRY_AFTER_MAX_S = 60.0
SHARD_HEADER = "X-Shardcast-Shard"
SERVER_HEADER = "X-Shardcast-Server"
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")

WriteChunks = Callable[[list[bytes]], Awaitable[None]]


class Misbehaved(SourceFault):
    """The source answered what no honest source would."""


class Unavailable(SourceFault):
    """The source failed in a way that may pass."""


class Refused(Unavailable):
    """The source answered that it doesn't serve this now; for shards it is asked again after `retry_after_s`."""

    def __init__(self, said: str, retry_after_s: float) -> None:
        super().__init__(said)
        self.retry_after_s = retry_after_s


class NotYet(Unavailable):
    """The source knows the shard and doesn't have it yet."""


class Unknown(Unavailable):
    """The source doesn't have this version or shard."""


@dataclass(frozen=True, slots=True)
class Head:
    """The newest version of a run and the digest of its manifest."""

    version: int
    manifest_digest: Digest


@dataclass(frozen=True, slots=True)
class Offer:
    """A shard that a source is about to send, or None if it had none in time. `server_id`: what it calls itself."""

    index: int | None
    server_id: str
    response: aiohttp.ClientResponse
    source: Source

    async def read(self, size: int, write: WriteChunks) -> None:
        """Stream the shard, which has `size` bytes, into `write`. Raises Misbehaved, Unavailable."""
        await self.source.read_offer(self.response, size, write)


def new_session(limits: ClientLimits) -> aiohttp.ClientSession:
    """A session that decodes nothing, follows nothing, keeps no cookies, and reads no proxy or netrc settings."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_timeout_s)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=timeout,
        auto_decompress=False,
        read_bufsize=_SOCKET_BUFFER_BYTES,
        headers={"Accept-Encoding": "identity", "User-Agent": "rollswarm-shardcast/1"},
    )


class Source:
    """One origin or relay. `peer`: it is a sibling of the relay that asks. `asker`: as whom to ask, at this moment."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        limits: ClientLimits,
        *,
        peer: bool = False,
        asker: Callable[[], Asker] = lambda: CLIENT,
    ) -> None:
        self.url = url
        self.peer = peer
        self._session = session
        self._limits = limits
        self._asker = asker
        self._refused: Refused | None = None  # the last time that a shard was asked for
        self._refused_until = 0.0

    async def head(self, after: int | None, wait_s: float) -> Head | None:
        """What the source says its head is, once it is above `after`; None if nothing came within `wait_s`.

        Not proof of anything: see the manifest before believing it. Raises Misbehaved, Unavailable.
        """
        query = {"wait": f"{wait_s:.3f}"} if after is None else {"after": str(after), "wait": f"{wait_s:.3f}"}
        async with self._get("/v1/head", wait_s, params=query) as response:
            if response.status == 204:
                return None
            await self._check_status(response, 200)
            body = await self._read_small(response, _HEAD_MAX_BYTES)
        return _parse_head(self.url, body)

    async def envelope(self, version: int, *, at_hand: bool = False) -> SignedEnvelope:
        """The signed manifest of a version as the source has it, unchecked. `at_hand`: only if it needn't get it first."""
        headers = Asker(Kind.PEER, "none").header() if at_hand else None  # who is asked so looks no further
        async with self._get(f"/v1/manifests/{version}", self._limits.shard_wait_s, headers=headers) as response:
            await self._check_status(response, 200)
            body = await self._read_small(response, self._limits.max_envelope_bytes)
        try:
            return envelope_from_json(body, self._limits.max_envelope_bytes)
        except InvalidManifest as error:
            raise Misbehaved(f"{self.url}: {error}") from None

    async def rotations(self) -> list[SignedEnvelope]:
        """The rotations of the trainer's key that the source knows of, unchecked; none from one that can't say."""
        async with self._get("/v1/keys", 0.0) as response:
            if response.status in (404, 405, 501):
                return []
            await self._check_status(response, 200)
            body = await self._read_small(response, MAX_CHAIN_BYTES)
        try:
            return chain_from_json(body)
        except InvalidRotation as error:
            raise Misbehaved(f"{self.url}: {error}") from None

    async def have(self, total: Digest, count: int, epoch: str, after: int, wait_s: float) -> Have | None:
        """What the source has of the version of `count` shards with this total digest; None if it has no news.

        Raises Unknown if the source can't say, Misbehaved, Unavailable.
        """
        query = {"epoch": epoch, "after": str(after), "wait": f"{wait_s:.3f}"}
        async with self._get(f"/v1/have/{total}", wait_s, params=query) as response:
            if response.status == 204:
                return None
            await self._check_status(response, 200)
            body = await self._read_small(response, MAX_HAVE_BYTES)
        try:
            return parse_have(body, count)
        except ValueError as error:
            raise Misbehaved(f"{self.url}: doesn't say which shards it has: {error}") from None

    async def read_shard(self, digest: Digest, size: int, offset: int, write: WriteChunks) -> None:
        """Stream bytes [offset, size) of a shard into `write`. What came before a fault has been written.

        Raises Misbehaved, Unavailable.
        """
        wait = self._limits.shard_wait_s
        headers = {"Prefer": f"wait={wait:.0f}"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        with self._heeding():
            async with self._get(f"/v1/shards/{digest}", wait, headers=headers) as response:
                await self._check_status(response, 206 if offset else 200)
                self._check_length(response, size, offset)
                await self._pump(response, size - offset, write)

    async def torrent(self, version: int, size: int) -> bytes:
        """The torrent of a version, unchecked; never more than `size` bytes. Raises Misbehaved, Unavailable."""
        async with self._get(f"/v1/torrents/{version}", self._limits.shard_wait_s) as response:
            await self._check_status(response, 200)
            return await self._read_small(response, size)

    async def peers(self, version: int, port: int | None) -> Peers:
        """Say where this client accepts connections for a version, and learn of others who swap it.

        Raises Unknown if the source helps no peers, Misbehaved, Unavailable.
        """
        body = json.dumps({"port": port}).encode("ascii")
        async with self._get(f"/v1/peers/{version}", 0.0, method="POST", data=body) as response:
            await self._check_status(response, 200)
            answer = await self._read_small(response, _PEERS_MAX_BYTES)
        try:
            return parse_peers(answer, await self._address())
        except ValueError as error:
            raise Misbehaved(f"{self.url}: doesn't name peers: {error}") from None

    async def _address(self) -> str:
        """Where the source is, as far as the resolver says; empty if it doesn't."""
        parts = urlsplit(self.url)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
        except OSError:
            return ""
        return str(found[0][4][0])

    @asynccontextmanager
    async def next_shard(self, version: int, wanted: int, count: int, wait_s: float, name: str) -> AsyncIterator[Offer]:
        """Have the source choose one of the `wanted` shards, as bits, of a version of `count`: one nobody else gets.

        `name`: what this client calls itself there, so that several questions at once get several answers.

        Raises Unknown if the source helps no peers, Misbehaved, Unavailable.
        """
        body = wanted.to_bytes(count // 8 + 1, "little")
        query = {"wait": f"{wait_s:.3f}", "as": name}
        with self._heeding():
            async with self._get(f"/v1/next/{version}", wait_s, method="POST", params=query, data=body) as response:
                server_id = response.headers.get(SERVER_HEADER, "")[:_MAX_ID]
                if response.status == 204:
                    yield Offer(None, server_id, response, self)
                    return
                await self._check_status(response, 200)
                index = response.headers.get(SHARD_HEADER, "")
                if not (index.isascii() and index.isdigit() and len(index) < 8 and int(index) < count):
                    raise Misbehaved(f"{self.url}: doesn't say which shard it gives")
                yield Offer(int(index), server_id, response, self)

    async def read_offer(self, response: aiohttp.ClientResponse, size: int, write: WriteChunks) -> None:
        """Stream an offered shard into `write`. What came before a fault has been written."""
        self._check_length(response, size, 0)
        await self._pump(response, size, write)

    @asynccontextmanager
    async def _get(
        self,
        path: str,
        wait_s: float,
        *,
        method: str = "GET",
        params: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
        data: bytes | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Headers must come within `wait_s` plus the read timeout. Network errors become Unavailable."""
        try:
            async with asyncio.timeout(wait_s + self._limits.connect_timeout_s + self._limits.read_timeout_s):
                asked = {**self._asker().header(), **(headers or {})}
                response = await self._session.request(
                    method, self.url + path, params=params, headers=asked, data=data, allow_redirects=False
                )
        except TimeoutError:
            raise Unavailable(f"{self.url}: no answer in time") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unavailable(f"{self.url}: {why_unreachable(error)}") from error
        whole = False
        try:
            yield response
            whole = True
        except TimeoutError:
            raise Unavailable(f"{self.url}: silent for {self._limits.read_timeout_s:.0f} s within an answer") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Unavailable(f"{self.url}: {why_unreachable(error)}") from error
        finally:
            if whole:
                response.release()
            else:
                response.close()

    async def _check_status(self, response: aiohttp.ClientResponse, expected: int) -> None:
        status = response.status
        if 300 <= status < 400:
            target = response.headers.get("Location", "?")
            raise Misbehaved(f"{self.url}: redirects to {target!r:.90}; name that source directly")
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Misbehaved(f"{self.url}: sends an encoded body, which was not asked for")
        if status == expected:
            return
        if status == 404:
            raise Unknown(f"{self.url}: doesn't have {response.url.path}")
        if status == 503 and response.headers.get("X-Shardcast") == "not-yet":
            raise NotYet(f"{self.url}: doesn't have the shard yet")
        if 200 <= status < 300 or status == 416:
            raise Misbehaved(f"{self.url}: answers {status} where {expected} is due")
        answer = f"{self.url}: answers {status} {response.reason or ''}".rstrip()
        why = await self._why(response)
        raise Refused(f"{answer}: {why}" if why else answer, _retry_after_s(response))

    async def _why(self, response: aiohttp.ClientResponse) -> str:
        """What the source says of its refusal, as one line; empty if it says nothing."""
        try:
            async with asyncio.timeout(self._limits.read_timeout_s):
                body = await response.content.readexactly(_WHY_BYTES + 1)
        except asyncio.IncompleteReadError as whole:
            body = whole.partial
        except (TimeoutError, aiohttp.ClientError, OSError):
            return ""
        return said_in(body)

    @contextmanager
    def _heeding(self) -> Iterator[None]:
        """Ask for no shard before the time that the source named when it refused the last. Raises Unavailable."""
        clock = asyncio.get_running_loop().time
        if self._refused is not None and clock() < self._refused_until:
            raise Unavailable(str(self._refused))
        try:
            yield
        except Refused as refused:
            self._refused, self._refused_until = refused, clock() + refused.retry_after_s
            raise

    def _check_length(self, response: aiohttp.ClientResponse, size: int, offset: int) -> None:
        if response.content_length != size - offset:
            raise Misbehaved(f"{self.url}: announces {response.content_length} bytes where {size - offset} are due")
        if not offset:
            return
        found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if not found or tuple(map(int, found.groups())) != (offset, size - 1, size):
            raise Misbehaved(f"{self.url}: answers with another byte range than the one asked for")

    async def _read_small(self, response: aiohttp.ClientResponse, limit: int) -> bytes:
        if (response.content_length or 0) > limit:
            raise Misbehaved(f"{self.url}: announces {response.content_length} bytes, at most {limit} are allowed")
        parts: list[bytes] = []
        size = 0
        async with aclosing(self._chunks(response)) as chunks:
            async for chunk in chunks:
                size += len(chunk)
                if size > limit:
                    raise Misbehaved(f"{self.url}: sends more than {limit} bytes")
                parts.append(chunk)
        return b"".join(parts)

    async def _pump(self, response: aiohttp.ClientResponse, due: int, write: WriteChunks) -> None:
        """Hand the body on in batches; whatever happens, hand on what came."""
        batch: list[bytes] = []
        held = received = 0

        async def hand_on_rest() -> None:
            if batch:
                await write(batch)

        try:
            async with aclosing(self._chunks(response, due)) as chunks:
                async for chunk in chunks:
                    received += len(chunk)
                    if received > due:
                        raise Misbehaved(f"{self.url}: sends more than the {due} bytes that are due")
                    batch.append(chunk)
                    held += len(chunk)
                    if held >= _BATCH_BYTES:
                        full, batch, held = batch, [], 0
                        await write(full)
        except asyncio.CancelledError:
            with suppress(Exception):  # what is wrong with it must not take the place of the cancellation
                await hand_on_rest()
            raise
        except BaseException:
            await hand_on_rest()
            raise
        await hand_on_rest()
        if received < due:
            raise Unavailable(f"{self.url}: closed the connection after {received} of {due} bytes")

    async def _chunks(self, response: aiohttp.ClientResponse, due: int = 0) -> AsyncGenerator[bytes, None]:
        """The body's pieces; each must come in time, and all together not slower than the least rate.

        Of a body of `due` bytes, pieces are let grow in the socket's buffer: each costs much the same, however small.
        """
        clock = asyncio.get_running_loop().time
        begin = clock()
        received = 0
        while True:
            async with asyncio.timeout(self._limits.read_timeout_s):
                chunk = await response.content.readany()
            if not chunk:
                return
            received += len(chunk)
            elapsed = clock() - begin
            if elapsed > self._limits.min_rate_grace_s and received < elapsed * self._limits.min_bytes_per_s:
                raise Unavailable(f"{self.url}: sends only {received / elapsed:.0f} bytes/s")
            yield chunk
            pause = nap_s(len(chunk), due - received, received / max(elapsed, 1e-6))
            if pause:
                await _let_gather(response, pause)


def nap_s(came: int, left: int, rate: float) -> float:
    """How long to leave a socket alone from which `came` bytes were read, `left` are due, and so many come per second.

    Never so long that half of what is left would have come; not at all if that isn't worth it.
    """
    if came >= _WORTHWHILE_BYTES or left <= 0:
        return 0.0
    pause = min(_NAP_MAX_S, _WORTHWHILE_BYTES / rate, left / 2 / rate)
    return pause if pause >= _NAP_MIN_S else 0.0


async def _let_gather(response: aiohttp.ClientResponse, pause: float) -> None:
    """Read nothing from the connection for a while. A body that ended meanwhile has none any more."""
    transport = None if response.connection is None else response.connection.transport
    if transport is None or not transport.is_reading():
        return
    transport.pause_reading()
    try:
        await asyncio.sleep(pause)
    finally:
        transport.resume_reading()


def said_in(body: bytes) -> str:
    """The error that the body of a refusal holds, as one line; empty if it holds none."""
    try:
        said = json.loads(body)["error"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return "".join(each if each.isprintable() else " " for each in said) if isinstance(said, str) else ""


def _retry_after_s(response: aiohttp.ClientResponse) -> float:
    """Seconds that a source asks to be left alone for, within reason; 0 if it doesn't."""
    text = response.headers.get("Retry-After", "")
    return min(float(text), _RETRY_AFTER_MAX_S) if text.isascii() and text.isdigit() and len(text) < 16 else 0.0


def _parse_head(url: str, body: bytes) -> Head:
    try:
        fields = json.loads(body)
        version = fields["version"]
        digest = Digest(fields["manifest_digest"])
    except (ValueError, TypeError, KeyError, InvalidManifest, RecursionError):
        raise Misbehaved(f"{url}: its head is not {{version, manifest_digest}}: {body[:60]!r}") from None
    if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version <= MAX_VERSION:
        raise Misbehaved(f"{url}: its head has the version {version!r:.40}")
    return Head(version, digest)
