"""Relays that fill from one another: the origin sends about one copy, and nobody waits for a sibling for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
from aiohttp import web

from protocol.manifest import Digest
from shardcast.config import ClientLimits, ServerLimits
from shardcast.have import Have
from shardcast.origin import Origin
from shardcast.relay import RelayCatalog
from tests.shardcast_network import (
    FAST,
    SOON,
    FakeSource,
    assert_same,
    client,
    make_version,
    origin_in_process,
    publish,
    relay_in_process,
    reserve_port,
    whole,
)

LIMITS = replace(FAST, parallel=6, parallel_per_source=2, deadline_s=SOON)


def sent(origin: Origin) -> float:
    registry = origin.catalog.metrics.registry
    return sum(
        registry.get_sample_value("rollswarm_shardcast_bytes_total", {"direction": "out", "peer": peer}) or 0.0
        for peer in ("client", "relay")
    )


@asynccontextmanager
async def siblings(
    tmp_path: Path, upstream: str, count: int, limits: ClientLimits = LIMITS
) -> AsyncIterator[list[tuple[str, RelayCatalog]]]:
    """Relays that all know one another from the start, and themselves as well."""
    ports = [reserve_port() for _ in range(count)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    async with AsyncExitStack() as stack:
        relays = [
            await stack.enter_async_context(
                relay_in_process(tmp_path / f"relay{port}", upstream, peers=urls, port=port, limits=limits)
            )
            for port in ports
        ]
        yield relays


async def test_the_origin_sends_about_one_copy_whatever_the_number_of_relays(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v0", shards=64)
    async with (
        asyncio.timeout(SOON),
        origin_in_process(tmp_path / "origin") as (url, origin),
        siblings(tmp_path, url, 4) as relays,
    ):
        version = await publish(url, origin, version)
        async with client([each for each, _ in relays], tmp_path / "cache") as worker:
            assert_same(await worker.fetch(0, version.digest), version)
        for _, catalog in relays:
            await whole(catalog, 0)
        assert sent(origin) < 1.5 * version.manifest.total_bytes


async def test_a_sibling_that_has_everything_and_sends_nothing_is_not_waited_for(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v0")
    never = asyncio.Event()

    async def hold(request: web.Request, data: bytes) -> web.StreamResponse:
        await never.wait()
        return web.Response()

    boaster = FakeSource(version, shard=hold, have=Have("relay", "boaster", complete=True))
    limits = replace(LIMITS, read_timeout_s=1.0, shard_wait_s=0.5, connect_timeout_s=0.5)
    async with (
        asyncio.timeout(SOON),
        boaster.serving() as sibling,
        origin_in_process(tmp_path / "origin") as (url, origin),
        relay_in_process(tmp_path / "relay", url, peers=[sibling], limits=limits) as (_, catalog),
    ):
        version = await publish(url, origin, version)
        await whole(catalog, 0)
        assert boaster.asked and sent(origin) == version.manifest.total_bytes
        never.set()


async def test_a_sibling_that_claims_shards_for_ever_holds_nobody_up(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v0")
    everything = tuple(range(len(version.manifest.shards)))
    claimer = FakeSource(version, have=Have("relay", "claimer", False, "e", 0, (), everything))
    limits = replace(LIMITS, hint_patience_s=0.5)
    async with (
        asyncio.timeout(SOON),
        claimer.serving() as sibling,
        origin_in_process(tmp_path / "origin") as (url, origin),
        relay_in_process(tmp_path / "relay", url, peers=[sibling], limits=limits) as (_, catalog),
    ):
        version = await publish(url, origin, version)
        await whole(catalog, 0)


async def test_relays_that_name_one_another_as_origins_do_no_harm(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v0")
    ports = [reserve_port(), reserve_port()]
    first, second = (f"http://127.0.0.1:{port}" for port in ports)
    async with (
        asyncio.timeout(SOON),
        origin_in_process(tmp_path / "origin") as (url, origin),
        relay_in_process(tmp_path / "a", second, url, port=ports[0], limits=LIMITS) as (_, left),
        relay_in_process(tmp_path / "b", first, url, port=ports[1], limits=LIMITS) as (_, right),
        aiohttp.ClientSession() as session,
    ):
        version = await publish(url, origin, version)
        await whole(left, 0)
        await whole(right, 0)
        for address in (first, second):  # a version that nobody has is not looked for in circles
            assert (await session.get(f"{address}/v1/manifests/7")).status == 404
        assert (await session.get(f"{first}/v1/manifests/0")).status == 200


async def test_a_chain_of_relays_fills_without_the_origin_sending_twice(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v0")
    async with (
        asyncio.timeout(SOON),
        origin_in_process(tmp_path / "origin") as (url, origin),
        relay_in_process(tmp_path / "a", url) as (near, _),
        relay_in_process(tmp_path / "b", near) as (far, catalog),
        client([far], tmp_path / "cache") as worker,
    ):
        version = await publish(url, origin, version)
        assert_same(await worker.fetch(0, version.digest), version)
        await whole(catalog, 0)
        assert sent(origin) == version.manifest.total_bytes


async def test_a_relay_tells_what_it_has_and_what_is_coming(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v0")
    release = asyncio.Event()
    first: list[str] = []

    async def gate(request: web.Request, data: bytes) -> web.StreamResponse:
        if first:
            await release.wait()
        first.append(request.match_info["digest"])
        return web.Response(body=data)

    async with (
        asyncio.timeout(SOON),
        FakeSource(version, shard=gate).serving() as up,
        relay_in_process(tmp_path / "relay", up) as (url, catalog),
        aiohttp.ClientSession() as session,
        client([url], tmp_path / "cache") as worker,
    ):
        await worker.head(wait_s=SOON)
        address = f"{url}/v1/have/{version.manifest.total_digest}"
        while not (answer := await (await session.get(address)).json())["added"]:
            assert answer["complete"] is False
        index = answer["added"][0]
        assert version.manifest.shards[index].digest == first[0]
        assert (answer["role"], answer["after"], len(answer["added"])) == ("relay", 0, 1)
        news = {"epoch": answer["epoch"], "after": "1", "wait": "0.01"}
        assert (await session.get(address, params=news)).status == 204
        assert (await session.get(f"{url}/v1/have/{Digest.of(b'other')}?wait=0.01")).status == 204
        assert (await session.get(f"{url}/v1/have/7")).status == 400
        waiting = asyncio.create_task(session.get(address, params={**news, "wait": "20"}))
        release.set()
        assert (await (await waiting).json())["added"]
        await whole(catalog, 0)
        assert (await (await session.get(address)).json())["complete"] is True


async def test_a_closed_server_frees_those_who_wait_for_news(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(SOON),
        origin_in_process(tmp_path / "origin") as (url, origin),
        aiohttp.ClientSession() as session,
    ):
        waiting = asyncio.create_task(session.get(f"{url}/v1/have/{Digest.of(b'x')}?wait=20"))
        while origin.catalog.changed.waiting == 0:
            assert (await session.get(f"{url}/healthz")).status == 200
        origin.catalog.close()
        assert (await waiting).status == 204
    assert ServerLimits().head_wait_s > SOON
