"""What servers grant: connections, room on disk; and what a relay learns from a coordinator."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from protocol.errors import SourceFault
from protocol.terms import WELL_KNOWN_PATH
from shardcast.catalog import Catalog
from shardcast.config import ClientLimits, ServerLimits
from shardcast.discovery import Coordinator
from shardcast.layout import incoming_folder
from shardcast.listen import listening
from shardcast.metrics import ShardcastMetrics
from shardcast.quota import MonthlyQuota
from shardcast.server import ShardcastApp
from shardcast.storage import VersionStore
from shardcast.uplink import Uplink
from tests.factories import make_terms
from tests.shardcast_network import (
    FAST,
    KEYS,
    SHARD,
    SOON,
    STRANGER,
    FakeSource,
    assert_same,
    client,
    make_version,
    origin_in_process,
    publish,
    relay_in_process,
    reserve_port,
    run_command,
    until,
    whole,
)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [(ServerLimits(max_connections=2), "total"), (ServerLimits(max_connections_per_address=2), "address")],
)
async def test_connections_too_many_are_closed_at_once(tmp_path: Path, limits: ServerLimits, reason: str) -> None:
    metrics = ShardcastMetrics()
    app = ShardcastApp(Catalog(VersionStore(tmp_path, KEYS), metrics), limits).build()
    async with (
        asyncio.timeout(SOON),
        listening(app, "127.0.0.1", 0, limits, metrics.count_refused) as url,
        aiohttp.ClientSession() as session,
    ):
        port = urlsplit(url).port
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for reader, writer in idle:  # both are accepted: they get answers
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" in await reader.readline()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
        writer.close()
        refused = metrics.registry.get_sample_value("rollswarm_shardcast_refused_connections_total", {"reason": reason})
        assert refused == 1
        for _, each in idle:
            each.close()
            await each.wait_closed()
        while True:  # as soon as the server has seen them go
            try:
                assert (await session.get(f"{url}/healthz")).status == 200
                break
            except aiohttp.ClientError:
                continue


async def test_a_relay_stays_within_its_room_and_keeps_the_newest(tmp_path: Path) -> None:
    size = make_version(tmp_path / "probe", 0).manifest.total_bytes
    async with (
        asyncio.timeout(SOON),
        origin_in_process(tmp_path / "origin") as (url, origin),
        relay_in_process(tmp_path / "relay", url, keep_last=9, max_disk_bytes=2 * size + 10) as (relay_url, catalog),
    ):
        for number in (1, 2, 3, 4):
            version = await publish(url, origin, make_version(tmp_path / f"v{number}", number))
            await whole(catalog, number)
        assert catalog.store.versions == [3, 4]
        # One that doesn't fit at all is not begun; what is here is served on.
        await publish(url, origin, make_version(tmp_path / "v5", 5, shards=40))
        async with aiohttp.ClientSession() as session:
            while "does not fit into --max-disk-gib" not in await (await session.get(f"{relay_url}/healthz")).text():
                assert catalog.store.get(5) is None
        async with client([relay_url], tmp_path / "cache") as worker:
            assert_same(await worker.fetch(4, version.digest), version)
        assert catalog.store.versions[-1] == 4
        assert 2 * size < SHARD * 40


async def test_a_relay_whose_month_is_used_up_sends_clients_elsewhere(tmp_path: Path) -> None:
    quota = MonthlyQuota(tmp_path / "month.json", SHARD)
    async with (
        asyncio.timeout(SOON),
        origin_in_process(tmp_path / "origin") as (url, origin),
        relay_in_process(tmp_path / "spent", url, quota=quota) as (spent_url, spent),
        relay_in_process(tmp_path / "free", url) as (free_url, free),
        aiohttp.ClientSession() as session,
    ):
        version = await publish(url, origin, make_version(tmp_path / "v1", 1))
        await whole(spent, 1)
        await whole(free, 1)
        shard = f"{spent_url}/v1/shards/{version.manifest.shards[0].digest}"
        while (answer := await session.get(shard)).status == 200:
            await answer.read()
        assert (answer.status, "this month" in await answer.text()) == (503, True)
        assert 0 < int(answer.headers["Retry-After"]) <= 31 * 86_400 + 1
        health = await (await session.get(f"{spent_url}/healthz")).json()
        assert health["quota_left_bytes"] == 0 and "this month" in health["status"]
        assert "left of this month" in await (await session.get(spent_url)).text()
        async with client([spent_url], tmp_path / "alone") as worker:
            with pytest.raises(
                SourceFault, match="503 Service Unavailable: this relay sent all that it may this month"
            ):
                await worker.fetch(1)
        async with client([spent_url, free_url], tmp_path / "cache") as worker:
            assert_same(await worker.fetch(1, version.digest), version)


async def ask_and_leave(url: str, path: str, asked: list[str]) -> None:
    """Ask for a shard, read the status, and cut the connection, again and again."""
    parts = urlsplit(url)
    while True:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            asked.append((await reader.readline()).decode())
        except ConnectionError:
            continue
        finally:
            writer.transport.abort()


async def test_who_asks_and_leaves_takes_no_bandwidth_from_others(tmp_path: Path) -> None:
    asked: list[str] = []
    async with (
        asyncio.timeout(SOON),
        origin_in_process(tmp_path / "origin") as (url, origin),
        relay_in_process(tmp_path / "relay", url, uplink=Uplink.from_mbit(8)) as (relay_url, catalog),
    ):
        version = await publish(url, origin, make_version(tmp_path / "v1", 1))
        await whole(catalog, 1)
        path = f"/v1/shards/{version.manifest.shards[-1].digest}"
        leavers = [asyncio.create_task(ask_and_leave(relay_url, path, asked)) for _ in range(20)]
        try:
            await until(lambda: len(asked) > 200)
            async with client([relay_url], tmp_path / "cache", limits=ClientLimits(deadline_s=SOON)) as worker:
                assert_same(await worker.fetch(1, version.digest), version)
        finally:
            for task in leavers:
                task.cancel()
            await asyncio.gather(*leavers, return_exceptions=True)


async def test_more_than_can_be_sent_soon_is_refused_and_who_comes_from_elsewhere_is_served(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v1", 1)
    store = VersionStore(tmp_path / "data", KEYS)
    version.folder.rename(incoming_folder(store.root, 1))
    store.adopt(incoming_folder(store.root, 1), version.envelope, version.manifest)
    app = ShardcastApp(Catalog(store, ShardcastMetrics()), ServerLimits(), Uplink.from_mbit(0.5)).build()
    async with asyncio.timeout(SOON), listening(app, "127.0.0.1", 0, ServerLimits(shutdown_s=0.1)) as url:
        shard = f"{url}/v1/shards/{next(each.digest for each in version.manifest.shards if each.size == SHARD)}"
        async with aiohttp.ClientSession() as session:
            answers = [await session.get(shard) for _ in range(9)]
            served = [answer for answer in answers if answer.status == 200]
            assert 3 <= len(served) < 9  # a burst, one that is paid off, and 5 seconds of 64 KiB each
            refused = answers[-1]
            assert refused.status == 503 and "at once" in await refused.text()
            assert 1 <= int(refused.headers["Retry-After"]) <= 5
            elsewhere = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
            async with aiohttp.ClientSession(connector=elsewhere) as other:
                assert len(await (await other.get(shard)).read()) == SHARD
            for answer in answers:
                answer.close()


async def test_a_relay_that_is_its_own_origin_says_so(tmp_path: Path) -> None:
    port = str(reserve_port())
    status, _, err = await run_command(
        "relay", "--origin", f"http://localhost:{port}", "--trainer-key", KEYS[0],
        "--data-dir", str(tmp_path), "--host", "127.0.0.1", "--port", port,
        "--coordinator=", "--peer=",
    )  # fmt: skip
    assert status == 2 and f"http://localhost:{port} is this relay itself" in err, err


async def test_a_relay_that_can_have_nothing_counts_how_long(tmp_path: Path) -> None:
    strange = FakeSource(make_version(tmp_path / "v0", signer=STRANGER))
    async with (
        asyncio.timeout(SOON),
        strange.serving() as source,
        relay_in_process(tmp_path / "relay", source) as (url, catalog),
        aiohttp.ClientSession() as session,
    ):
        await until(lambda: "can't follow" in str(catalog.health()["status"]))
        health = catalog.health()
        assert (health["head"], health["following"]) == (None, False)
        assert "nothing is here" in str(health["status"])
        await until(lambda: float(str(catalog.health()["behind_s"])) > 0)
        assert ">unknown<" in await (await session.get(url)).text()
        lag = catalog.metrics.registry.get_sample_value("rollswarm_shardcast_lag_seconds")
        assert lag is not None and lag > 0


async def test_a_relay_that_hears_from_its_origin_is_not_behind(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(SOON),
        origin_in_process(tmp_path / "origin") as (url, origin),
        relay_in_process(tmp_path / "relay", url) as (_, catalog),
    ):
        await publish(url, origin, make_version(tmp_path / "v1", 1))
        await whole(catalog, 1)
        await until(lambda: (catalog.health()["behind_s"], catalog.health()["following"]) == (0.0, True))


async def test_a_version_that_is_being_read_makes_no_way(tmp_path: Path) -> None:
    size = make_version(tmp_path / "probe", 0).manifest.total_bytes
    async with (
        asyncio.timeout(SOON),
        origin_in_process(tmp_path / "origin") as (url, origin),
        relay_in_process(tmp_path / "relay", url, keep_last=9, max_disk_bytes=3 * size + 10) as (_, catalog),
    ):
        await publish(url, origin, make_version(tmp_path / "v1", 1))
        await whole(catalog, 1)
        with catalog.store.reading(1):
            for number in (2, 3, 4):
                await publish(url, origin, make_version(tmp_path / f"v{number}", number))
                await whole(catalog, number)
            assert catalog.store.versions == [1, 3, 4]


async def test_a_relay_learns_its_siblings_from_the_coordinator(tmp_path: Path) -> None:
    ports = [reserve_port(), reserve_port()]
    urls = tuple(f"http://127.0.0.1:{port}" for port in ports)

    async def terms(request: web.Request) -> web.Response:
        return web.Response(text=make_terms(relays=(*urls, "no url")).to_json())

    app = web.Application()
    app.router.add_get(WELL_KNOWN_PATH, terms)
    async with (
        asyncio.timeout(SOON),
        listening(app, "127.0.0.1", 0, ServerLimits()) as coordinator,
        origin_in_process(tmp_path / "origin") as (url, origin),
        relay_in_process(tmp_path / "a", url, port=ports[0], coordinator=Coordinator(coordinator)) as (_, left),
        relay_in_process(tmp_path / "b", url, port=ports[1]) as (_, right),
    ):
        finding = asyncio.create_task(left.find_siblings())
        async with aiohttp.ClientSession() as session:
            while len((await (await session.get(f"{urls[0]}/healthz")).json())["sources"]) < 3:
                assert not finding.done()
        await publish(url, origin, make_version(tmp_path / "v0"))
        await whole(left, 0)
        await whole(right, 0)
        faults = {source["url"]: source["last_fault"] for source in left.health()["sources"]}  # type: ignore[attr-defined]
        assert "is this relay itself" in faults[urls[0]]
        finding.cancel()
    assert FAST.parallel > 1
