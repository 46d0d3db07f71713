"""SHARDCAST against hostile and broken sources, on real sockets: each is named and left, and nothing wrong is kept."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from protocol.errors import SourceFault
from protocol.manifest import (
    SignedEnvelope,
    envelope_to_json,
)
from protocol.signing import MANIFEST
from shardcast.config import ClientLimits
from shardcast.names import VersionConflict
from tests.shardcast_network import (
    FAST,
    SHARD,
    SHARDS,
    SOON,
    STRANGER,
    TRAINER,
    FakeSource,
    assert_same,
    client,
    make_version,
    names_below,
    serve_range,
)


async def flip_a_byte(request: web.Request, data: bytes) -> web.StreamResponse:
    return web.Response(body=bytes([data[0] ^ 1]) + data[1:])


async def redirect(request: web.Request, data: bytes) -> web.StreamResponse:
    raise web.HTTPFound("http://127.0.0.1:1/elsewhere")


async def too_short(request: web.Request, data: bytes) -> web.StreamResponse:
    return web.Response(body=data[:-1])


async def too_long(request: web.Request, data: bytes) -> web.StreamResponse:
    return web.Response(body=data + b"x")


async def encoded(request: web.Request, data: bytes) -> web.StreamResponse:
    return web.Response(body=data, headers={"Content-Encoding": "gzip"})


async def endless(request: web.Request, data: bytes) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(data)


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        (flip_a_byte, "wrong bytes"),
        (redirect, "redirects"),
        (too_short, "announces"),
        (too_long, "announces"),
        (encoded, "encoded"),
        (endless, "announces None"),
    ],
)
async def test_a_source_that_misbehaves_is_dropped_and_named(
    tmp_path: Path, behaviour: Callable[..., Awaitable[web.StreamResponse]], said: str
) -> None:
    version = make_version(tmp_path / "v0")
    evil, honest = FakeSource(version, shard=behaviour), FakeSource(version)
    async with asyncio.timeout(SOON), evil.serving() as bad, honest.serving() as good:
        async with client([bad, good], tmp_path / "cache") as both:
            assert_same(await both.fetch(0), version)
            stats = both.source_stats[bad]
            assert stats.bans >= 1 and said in stats.last_fault
            assert both.source_stats[good].bans == 0
        assert len(evil.asked) <= FAST.parallel
        async with client([bad], tmp_path / "alone") as alone:
            with pytest.raises(SourceFault, match=rf"dropped: {bad}.*{said}"):
                await alone.fetch(0)
            assert alone.store.versions == [] and not list((tmp_path / "alone" / "versions").iterdir())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            b'{"error": "this relay sent all\\u001b[31m"}',
            r"answers 503 Service Unavailable: this relay sent all \[31m$",
        ),
        (json.dumps({"error": "x" * 5000}).encode(), "answers 503 Service Unavailable$"),
        (b'{"error": 7}', "answers 503 Service Unavailable$"),
        (b"[" * 1000, "answers 503 Service Unavailable$"),
        (b"", "answers 503 Service Unavailable$"),
    ],
)
async def test_why_a_source_refuses_is_said_and_heeded(tmp_path: Path, body: bytes, said: str) -> None:
    async def refuse(request: web.Request, data: bytes) -> web.StreamResponse:
        return web.Response(status=503, body=body, headers={"Retry-After": "2678400"})

    source = FakeSource(make_version(tmp_path / "v0"), shard=refuse)
    async with asyncio.timeout(SOON), source.serving() as url, client([url], tmp_path / "cache") as worker:
        with pytest.raises(SourceFault, match=said):
            await worker.fetch(0)
    assert len(source.asked) == 1


async def test_who_asked_to_be_left_alone_for_a_moment_is_asked_again_after_it(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    at: list[float] = []

    async def refuse_once(request: web.Request, data: bytes) -> web.StreamResponse:
        at.append(loop.time())
        return web.Response(status=503, headers={"Retry-After": "1"}) if len(at) == 1 else serve_range(request, data)

    version = make_version(tmp_path / "v0")
    source = FakeSource(version, shard=refuse_once)
    async with asyncio.timeout(SOON), source.serving() as url, client([url], tmp_path / "cache") as worker:
        assert_same(await worker.fetch(0), version)
    assert at[1] - at[0] >= 1.0


async def test_a_source_that_trickles_or_falls_silent_is_left(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v0")
    ended = asyncio.Event()

    async def trickle(request: web.Request, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = len(data)
        await response.prepare(request)
        for at in range(len(data)):
            await response.write(data[at : at + 1])
            try:
                async with asyncio.timeout(0.05):
                    await ended.wait()
            except TimeoutError:
                continue
        return response

    async with asyncio.timeout(SOON), FakeSource(version, shard=trickle).serving() as slow:
        async with FakeSource(version).serving() as good, client([slow, good], tmp_path / "cache") as both:
            assert_same(await both.fetch(0), version)
            assert "bytes/s" in both.source_stats[slow].last_fault
        ended.set()


async def test_a_cut_connection_is_resumed_where_it_broke(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v0")
    cut: set[str] = set()

    async def cut_once(request: web.Request, data: bytes) -> web.StreamResponse:
        if request.match_info["digest"] in cut or len(data) < SHARD // 2:
            return serve_range(request, data)
        cut.add(request.match_info["digest"])
        response = web.StreamResponse()
        response.content_length = len(data)
        await response.prepare(request)
        await response.write(data[: SHARD // 2])
        assert request.transport is not None
        request.transport.close()
        return response

    source = FakeSource(version, shard=cut_once)
    async with asyncio.timeout(SOON), source.serving() as url, client([url], tmp_path / "cache") as resuming:
        assert_same(await resuming.fetch(0), version)
    assert source.ranges.count(f"bytes={SHARD // 2}-") == SHARDS


async def test_bytes_pieced_together_from_two_sources_ban_neither(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v0")

    async def lie_and_cut(request: web.Request, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = len(data)
        await response.prepare(request)
        await response.write(bytes(len(data) // 2))
        assert request.transport is not None
        request.transport.close()
        return response

    evil, honest = FakeSource(version, shard=lie_and_cut), FakeSource(version)
    async with (
        asyncio.timeout(SOON),
        evil.serving() as bad,
        honest.serving() as good,
        client([bad, good], tmp_path / "cache") as both,
    ):
        assert_same(await both.fetch(0), version)
        assert both.source_stats[good].bans == 0
        assert both.source_stats[bad].success < 1.0


async def test_forged_manifests_are_refused_whatever_they_say(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v0")
    forged = make_version(tmp_path / "forged", signer=STRANGER)
    claimed = SignedEnvelope(forged.envelope.payload, TRAINER.key_id, forged.envelope.signature)
    body = json.loads(version.envelope.payload)
    body["files"][1]["path"] = "../../../escaped"
    traversal = TRAINER.sign(MANIFEST, json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    other_number = make_version(tmp_path / "v9", 9).envelope
    for envelope, said in (
        (forged.envelope, "not a key this run pins"),
        (claimed, "does not match"),
        (traversal, "'..'"),
        (other_number, "version 9 for 0"),
    ):

        async def lie(request: web.Request, envelope: SignedEnvelope = envelope) -> web.StreamResponse:
            return web.Response(body=envelope_to_json(envelope))

        async with asyncio.timeout(SOON), FakeSource(version, manifest=lie).serving() as bad:
            async with client([bad], tmp_path / "cache") as alone:
                with pytest.raises(SourceFault, match=said):
                    await alone.fetch(0)
                with pytest.raises(SourceFault):
                    await alone.head()
            async with FakeSource(version).serving() as good, client([bad, good], tmp_path / "both") as both:
                head = await both.head()
                assert head is not None and head.manifest_digest == version.digest
                assert both.source_stats[bad].bans == 1
    assert "escaped" not in names_below(tmp_path)


async def test_an_endless_manifest_is_cut_off(tmp_path: Path) -> None:
    async def flood(request: web.Request) -> web.StreamResponse:
        return await endless(request, b" " * 65536)

    limits = ClientLimits(max_envelope_bytes=2**20)
    version = make_version(tmp_path / "v0")
    async with (
        asyncio.timeout(SOON),
        FakeSource(version, manifest=flood).serving() as bad,
        client([bad], tmp_path / "cache", limits=limits) as alone,
    ):
        with pytest.raises(SourceFault, match="more than 1048576 bytes"):
            await alone.fetch(0)


async def test_a_version_larger_than_the_limit_is_not_begun(tmp_path: Path) -> None:
    source = FakeSource(make_version(tmp_path / "v0"))
    limits = ClientLimits(max_total_bytes=1000, deadline_s=0.1)
    async with (
        asyncio.timeout(SOON),
        source.serving() as url,
        client([url], tmp_path / "cache", limits=limits) as small,
    ):
        with pytest.raises(SourceFault, match="at most 1000"):
            await small.fetch(0)
    assert source.asked == []


async def test_an_expected_digest_decides_and_a_number_is_never_rebound(tmp_path: Path) -> None:
    right, wrong = make_version(tmp_path / "right"), make_version(tmp_path / "wrong", seed=1)
    async with asyncio.timeout(SOON), FakeSource(wrong).serving() as bad, FakeSource(right).serving() as good:
        async with client([bad, good], tmp_path / "cache") as picky:
            assert_same(await picky.fetch(0, right.digest), right)
            assert picky.prune(keep=set()) == [0]
        async with client([bad], tmp_path / "cache") as later:
            with pytest.raises(SourceFault, match="expected"):
                await later.fetch(0)
            with pytest.raises(VersionConflict, match="for ever"):
                await later.fetch(0, wrong.digest)
            assert later.store.versions == []


async def test_when_every_source_is_down_the_fault_names_each(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        down = f"http://127.0.0.1:{unused.getsockname()[1]}"
        limits = ClientLimits(deadline_s=0.3, connect_timeout_s=0.5)
        async with asyncio.timeout(SOON), client([down, "http://127.0.0.1:9"], tmp_path, limits=limits) as lonely:
            with pytest.raises(SourceFault, match=rf"{down}.*; http://127.0.0.1:9"):
                await lonely.fetch(0)
            with pytest.raises(SourceFault, match=down):
                await lonely.head()
