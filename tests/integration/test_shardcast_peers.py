"""Clients that swap a version among themselves: real servers, real libtorrent, sockets on loopback."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest
from aiohttp import web

from protocol.manifest import Digest
from shardcast.catalog import Catalog, OpenShard
from shardcast.client import ShardcastClient
from shardcast.config import ClientLimits, SwarmLimits
from shardcast.layout import incoming_folder, incoming_torrent
from shardcast.publish import announce
from shardcast.sources import SHARD_HEADER
from shardcast.swarm import Swarm, SwarmConfig
from shardcast.torrent import Layout
from tests.hostile_peer import HostilePeer
from tests.shardcast_network import (
    KEYS,
    SHARD,
    SHARDS,
    SOON,
    FakeSource,
    Version,
    assert_same,
    client,
    make_version,
    origin_in_process,
    relay_in_process,
    reserve_port,
    run_command,
    until,
)

ANY_PORT = -1


HASTY = SwarmLimits(give_up_s=2.0, patience_s=1.0, long_s=8.0)


def swapping(
    url: str, cache: Path, *others: str, port: int = ANY_PORT, limits: SwarmLimits | None = None
) -> ShardcastClient:
    swarm = Swarm(SwarmConfig(reserve_port() if port == ANY_PORT else port))
    given = ClientLimits(deadline_s=10.0, swarm=limits or SwarmLimits())
    return client([url, *others], cache, swarm=swarm, limits=given)


async def publish(data: Path, url: str, version: Version) -> None:
    number = version.manifest.policy_version
    incoming_folder(data, number).mkdir(parents=True)
    for name in ("model.safetensors", "config.json"):
        os.link(version.folder / name, incoming_folder(data, number) / name)
    assert version.torrent is not None
    incoming_torrent(data, number).write_bytes(version.torrent)
    await announce(url, version.envelope)


def sent_by(catalog: Catalog) -> float:
    return sum(catalog.metrics.bytes_total.labels("out", kind)._value.get() for kind in ("client", "relay"))


def answer_once_asked(catalog: Catalog, peer: HostilePeer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server sends nothing before the peer was asked for something."""
    open_shard = catalog.open_shard

    async def after_the_peer_was_asked(digest: Digest, wait_s: float) -> OpenShard | None:
        await peer.asked_at_all.wait()
        return await open_shard(digest, wait_s)

    monkeypatch.setattr(catalog, "open_shard", after_the_peer_was_asked)


@asynccontextmanager
async def published(tmp_path: Path, shards: int = SHARDS) -> AsyncIterator[tuple[str, Catalog, Version]]:
    """An origin with version 0 and its torrent."""
    version = make_version(tmp_path / "v0", shards=shards)
    async with asyncio.timeout(SOON), origin_in_process(tmp_path / "data") as (url, origin):
        await publish(tmp_path / "data", url, version)
        yield url, origin.catalog, version


async def test_two_workers_and_a_relay_exchange_a_version(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v0", shards=64)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(SOON))
        url, origin = await stack.enter_async_context(origin_in_process(tmp_path / "data"))
        relay_url, relay = await stack.enter_async_context(
            relay_in_process(tmp_path / "relay", url, limits=ClientLimits(), help_peers=True)
        )
        workers = [
            await stack.enter_async_context(swapping(relay_url, tmp_path / f"worker{number}")) for number in range(2)
        ]
        heads = [asyncio.create_task(worker.head(wait_s=SOON)) for worker in workers]
        await publish(tmp_path / "data", url, version)
        for head in heads:
            found = await head
            assert found is not None and found.manifest_digest == version.digest
        for folder in await asyncio.gather(*(worker.fetch(0) for worker in workers)):
            assert_same(folder, version)
        assert sent_by(origin.catalog) == version.manifest.total_bytes
        assert sent_by(relay) < 1.5 * version.manifest.total_bytes  # not a copy for each


async def test_who_accepts_no_connections_still_gives_and_takes(tmp_path: Path) -> None:
    async with (
        published(tmp_path, shards=64) as (url, catalog, version),
        swapping(url, tmp_path / "open") as reachable,
        swapping(url, tmp_path / "shut", port=0) as shut,
    ):
        for folder in await asyncio.gather(reachable.fetch(0), shut.fetch(0)):
            assert_same(folder, version)
        assert sent_by(catalog) < 1.5 * version.manifest.total_bytes


async def test_peers_that_never_meet_each_get_all_from_the_server(tmp_path: Path) -> None:
    async with (
        published(tmp_path) as (url, catalog, version),
        swapping(url, tmp_path / "one", port=0) as one,
        swapping(url, tmp_path / "other", port=0) as other,
    ):
        for folder in await asyncio.gather(one.fetch(0), other.fetch(0)):
            assert_same(folder, version)
        assert sent_by(catalog) - 2 * version.manifest.total_bytes <= 2 * SHARD


async def test_a_latecomer_is_fed_by_peers_until_they_remove_the_version(tmp_path: Path) -> None:
    async with published(tmp_path) as (url, catalog, version), swapping(url, tmp_path / "early") as early:
        folder = await early.fetch(0)
        before = sent_by(catalog)
        assert before == version.manifest.total_bytes
        async with swapping(url, tmp_path / "late") as late:
            assert_same(await late.fetch(0), version)
        assert sent_by(catalog) - before < before / 2
        reading = (folder / "model.safetensors").open("rb")
        with reading:
            assert early.prune(keep=()) == [0] and not folder.exists()
            assert reading.read() == (version.folder / "model.safetensors").read_bytes()
        assert early.swapped == [0]
        await until(lambda: early.swapped == [])


@pytest.mark.parametrize("answers", [True, False], ids=["rubbish", "silence"])
async def test_a_lying_peer_corrupts_nothing_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    async with published(tmp_path) as (url, catalog, version):
        hostile = HostilePeer(SHARDS + 1, answers)
        answer_once_asked(catalog, hostile, monkeypatch)
        async with hostile.listening() as port, aiohttp.ClientSession() as session:
            await session.post(f"{url}/v1/peers/0", json={"port": port})
            async with swapping(url, tmp_path / "cache") as honest:
                assert_same(await honest.fetch(0), version)
        assert hostile.greeted and hostile.asked


def drip_peer(version: Version) -> HostilePeer:
    """One that claims to have all, and sends the right bytes drop by drop."""
    layout = Layout.of(version.manifest)
    assert layout is not None
    files = [(version.folder / each.path).read_bytes() for each in version.manifest.files]
    data = b"".join(each + bytes(-len(each) % layout.piece_bytes) for each in files)
    return HostilePeer(layout.pieces, True, data, layout.piece_bytes, every_s=0.5)


async def test_a_peer_that_sends_drop_by_drop_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with published(tmp_path) as (url, catalog, version):
        slow = drip_peer(version)
        answer_once_asked(catalog, slow, monkeypatch)
        async with slow.listening() as port, aiohttp.ClientSession() as session:
            await session.post(f"{url}/v1/peers/0", json={"port": port})
            async with swapping(url, tmp_path / "cache", limits=HASTY) as honest:
                assert_same(await honest.fetch(0), version)
        assert 0 < slow.sent < len(slow.data) / 2 < sent_by(catalog)


@asynccontextmanager
async def drip_relay(url: str, version: Version, given: list[int]) -> AsyncIterator[str]:
    """One that passes on what `url` says, and sends the shards that it gives drop by drop. `given`: which it gave."""

    async def pass_on(request: web.Request) -> web.StreamResponse:
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, url + request.path_qs, data=await request.read()) as answer,
        ):
            return web.Response(status=answer.status, body=await answer.read())

    async def drip(request: web.Request) -> web.StreamResponse:
        wanted = int.from_bytes(await request.read(), "little")
        index = (wanted & -wanted).bit_length() - 1
        shard = version.manifest.shards[index]
        given.append(index)
        answer = web.StreamResponse(headers={SHARD_HEADER: str(index)})
        answer.content_length = shard.size
        await answer.prepare(request)
        for byte in version.shard_bytes(shard.digest) or b"":
            await answer.write(bytes([byte]))
            await asyncio.sleep(0.2)
        return answer

    source = FakeSource(version)
    async with source.serving(
        ("/v1/next/{version}", drip), ("/v1/peers/{version}", pass_on), ("/v1/torrents/{version}", pass_on)
    ) as drips:
        yield drips


@pytest.mark.parametrize("with_peer", [True, False])
async def test_a_relay_that_drips_as_well_as_a_peer_holds_nobody_up(tmp_path: Path, with_peer: bool) -> None:
    given: list[int] = []
    async with published(tmp_path) as (url, catalog, version), drip_relay(url, version, given) as drips:
        slow = drip_peer(version)
        async with slow.listening() as port, aiohttp.ClientSession() as session:
            if with_peer:
                await session.post(f"{url}/v1/peers/0", json={"port": port})
            async with swapping(drips, tmp_path / "cache", url, limits=HASTY) as honest:
                assert_same(await honest.fetch(0), version)
        assert given and bool(slow.sent) is with_peer
        assert sent_by(catalog) > version.manifest.total_bytes / 2


async def test_servers_that_give_nothing_while_peers_drip_are_asked_the_plain_way(tmp_path: Path) -> None:
    async def nothing(request: web.Request) -> web.StreamResponse:
        return web.Response(status=204)

    async with published(tmp_path) as (_, _, version):
        slow, source = drip_peer(version), FakeSource(version)

        async def peers(request: web.Request) -> web.StreamResponse:
            return web.json_response({"peers": [["127.0.0.1", port]], "again_s": 5.0})

        async def torrent(request: web.Request) -> web.StreamResponse:
            assert version.torrent is not None
            return web.Response(body=version.torrent)

        routes = (
            ("/v1/next/{version}", nothing),
            ("/v1/peers/{version}", peers),
            ("/v1/torrents/{version}", torrent),
        )
        async with (
            slow.listening() as port,
            source.serving(*routes) as stingy,
            swapping(stingy, tmp_path / "cache", limits=HASTY) as honest,
        ):
            assert_same(await honest.fetch(0), version)
        assert slow.sent and source.asked


async def test_shards_of_an_earlier_attempt_are_not_asked_for_again(tmp_path: Path) -> None:
    async with published(tmp_path) as (url, catalog, version):
        async with swapping(url, tmp_path / "cache") as resuming:
            partial = resuming.store.open_partial(version.envelope, version.manifest)
            for index in range(5):
                with partial.writer(index) as writer:
                    data = version.shard_bytes(version.manifest.shards[index].digest)
                    assert data is not None
                    writer.write([data])
                    assert partial.commit(index, writer.digest)
            done = partial.done_bytes
            partial.close()
            assert_same(await resuming.fetch(0), version)
        assert sent_by(catalog) == version.manifest.total_bytes - done


async def test_files_that_another_version_has_are_not_sent_again(tmp_path: Path) -> None:
    async with published(tmp_path) as (url, catalog, _), swapping(url, tmp_path / "cache") as steady:
        await steady.fetch(0)
        second = make_version(tmp_path / "v1", 1)
        await publish(tmp_path / "data", url, second)
        before = sent_by(catalog)
        assert_same(await steady.fetch(1), second)
        assert sent_by(catalog) - before == second.manifest.files[1].size


async def test_without_peers_no_socket_is_opened(tmp_path: Path) -> None:
    def open_ports() -> set[int]:
        sockets = psutil.Process().net_connections("inet")
        return {each.laddr.port for each in sockets if each.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)}

    async with published(tmp_path) as (url, _, version):
        before = open_ports()
        async with client([url], tmp_path / "plain") as plain:
            assert_same(await plain.fetch(0), version)
            assert open_ports() == before
        async with swapping(url, tmp_path / "asked") as asked:
            assert open_ports() == before  # not even before the first version
            await asked.fetch(0)
            assert open_ports() > before
        assert open_ports() == before


async def test_a_server_that_helps_no_peers_serves_everyone_in_the_plain_way(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v0")
    data = tmp_path / "data"
    async with asyncio.timeout(SOON), origin_in_process(data, help_peers=False) as (url, _):
        await publish(data, url, version)
        async with swapping(url, tmp_path / "cache") as lonely, aiohttp.ClientSession() as session:
            assert_same(await lonely.fetch(0), version)
            assert lonely.swapped == []
            for method, path in (("GET", "torrents"), ("POST", "peers"), ("POST", "next")):
                assert (await session.request(method, f"{url}/v1/{path}/0")).status == 404


async def test_another_torrent_than_the_signed_one_is_not_joined(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v0")
    other = make_version(tmp_path / "other", seed=1)
    source = FakeSource(version)
    asked: list[str] = []

    async def lie(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(body=other.torrent)

    async with (
        asyncio.timeout(SOON),
        source.serving(("/v1/torrents/{version}", lie)) as url,
        swapping(url, tmp_path / "cache") as careful,
    ):
        assert_same(await careful.fetch(0), version)
        assert asked and careful.swapped == []


async def test_a_server_that_gives_wrong_bytes_is_dropped(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v0")

    async def torrent(request: web.Request) -> web.Response:
        return web.Response(body=version.torrent)

    async def wrong(request: web.Request) -> web.Response:
        return web.Response(body=bytes(SHARD), headers={SHARD_HEADER: "1"})

    async with (
        published(tmp_path / "good") as (good, _, _),
        FakeSource(version).serving(("/v1/torrents/{version}", torrent), ("/v1/next/{version}", wrong)) as bad,
        client([bad, good], tmp_path / "cache", swarm=Swarm(SwarmConfig(0))) as careful,
    ):
        assert_same(await careful.fetch(0), version)
        stats = careful.source_stats[bad]
        assert stats.bans and ("wrong bytes" in stats.last_fault or "not asked for" in stats.last_fault)


async def test_the_routes_for_peers_refuse_what_is_malformed(tmp_path: Path) -> None:
    async with published(tmp_path) as (url, _, version), aiohttp.ClientSession() as session:
        torrent = await session.get(f"{url}/v1/torrents/0")
        assert (torrent.status, await torrent.read()) == (200, version.torrent)
        for method, path, body, status in (
            ("GET", "/v1/torrents/1", None, 503),
            ("GET", "/v1/torrents/x", None, 503),
            ("POST", "/v1/peers/1", b'{"port": 1}', 503),
            ("POST", "/v1/peers/0", b'{"port": 70000}', 400),
            ("POST", "/v1/peers/0", b'{"port": true}', 400),
            ("POST", "/v1/peers/0", b"[]", 400),
            ("POST", "/v1/peers/0", b" " * 2000, 400),
            ("POST", "/v1/next/1", b"\xff", 503),
            ("POST", "/v1/next/0", b"\xff" * 1000, 400),
            ("POST", "/v1/next/0?wait=nan", b"\xff", 400),
            ("POST", "/v1/next/0?wait=x", b"\xff", 400),
            ("POST", "/v1/next/0", b"\x00", 204),
        ):
            assert (await session.request(method, url + path, data=body)).status == status, (path, body)
        answer = await session.post(f"{url}/v1/next/0", data=b"\x04\x00")
        assert answer.headers[SHARD_HEADER] == "2"
        assert await answer.read() == version.shard_bytes(version.manifest.shards[2].digest)
        assert (await session.post(f"{url}/v1/next/0", data=b"\x04\x00")).status == 204  # given already


async def test_the_command_line_fetches_with_peers(tmp_path: Path) -> None:
    async with published(tmp_path) as (url, _, version), swapping(url, tmp_path / "here") as here:
        await here.fetch(0)
        status, out, err = await run_command(
            *("fetch", "--source", url, "--trainer-key", *KEYS, "--out", str(tmp_path / "there")),
            *("--peers", "--peer-port", "0"),
        )
        assert status == 0 and f"digest={version.digest}" in out, err
        assert_same(next((tmp_path / "there" / "versions").iterdir()), version)
