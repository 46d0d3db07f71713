"""Origin, relay and client together, over real sockets and as real processes."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from protocol.errors import SourceFault
from shardcast.client import Progress
from shardcast.config import ClientLimits
from shardcast.layout import incoming_folder
from shardcast.publish import announce, publish_version
from tests.shardcast_network import (
    SHARD,
    SOON,
    TRAINER,
    FakeSource,
    assert_same,
    client,
    folder_of,
    make_version,
    origin_in_process,
    process,
    ready_url,
    relay_in_process,
    run_command,
    serve_range,
    whole,
)


async def test_origin_relay_and_client_as_processes(tmp_path: Path) -> None:
    data = tmp_path / "origin"
    log = tmp_path / "log"
    key = ("--trainer-key", TRAINER.key_id)
    first = make_version(tmp_path / "v0", 0)
    second = make_version(tmp_path / "v1", 1)
    async with process("origin", "--data-dir", str(data), "--port", "0", *key, log=log) as origin:
        origin_url = await ready_url(origin)
        relay_arguments = ("relay", "--origin", origin_url, "--data-dir", str(tmp_path / "relay"), "--port", "0", *key)
        async with process(*relay_arguments, log=log) as relay:
            relay_url = await ready_url(relay)
            for version in (first, second):
                digest = await publish_version(
                    version.folder,
                    data,
                    TRAINER,
                    origin_url=origin_url,
                    run_id="run",
                    policy_version=version.manifest.policy_version,
                    shard_bytes=SHARD,
                    move=False,
                )
                assert digest == version.digest
            async with client([relay_url], tmp_path / "head") as watcher, asyncio.timeout(SOON):
                head = await watcher.head(after=0, wait_s=SOON)
            assert head is not None and (head.version, head.manifest_digest) == (1, second.digest)
            status, out, err = await run_command(
                "fetch", "--source", relay_url, *key, "--out", str(tmp_path / "cache"), "--version", "1"
            )
            assert status == 0, err
            assert_same(folder_of(out), second)
            status, out, err = await run_command("status", relay_url)
            assert status == 0 and "relay" in out and origin_url in out
            origin.send_signal(signal.SIGTERM)
            async with asyncio.timeout(SOON):
                assert await origin.wait() == 0
            relay.kill()
        # A relay starts from its disk, serves without its upstream, and ends gracefully.
        async with process(*relay_arguments, log=log) as relay:
            relay_url = await ready_url(relay)
            async with client([relay_url], tmp_path / "again") as again:
                assert_same(await again.fetch(1, second.digest), second)
            async with aiohttp.ClientSession() as session:
                metrics = await (await session.get(f"{relay_url}/metrics")).text()
                page = await (await session.get(f"{relay_url}/")).text()
            assert "rollswarm_shardcast_version 1.0" in metrics
            assert 'rollswarm_shardcast_bytes_total{direction="out",peer="client"}' in metrics
            assert "shardcast relay" in page
            relay.send_signal(signal.SIGTERM)
            async with asyncio.timeout(SOON):
                assert await relay.wait() == 0
    assert "Traceback" not in log.read_text()


async def test_a_relay_serves_a_shard_before_it_has_the_next(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v0")
    release = asyncio.Event()
    allowed: set[str] = set()

    async def gate(request: web.Request, data: bytes) -> web.StreamResponse:
        if len(allowed) < 2:
            allowed.add(request.match_info["digest"])
        if request.match_info["digest"] not in allowed:
            await release.wait()
        return serve_range(request, data)

    upstream = FakeSource(version, shard=gate)
    limits = ClientLimits(read_timeout_s=SOON, shard_wait_s=SOON, deadline_s=SOON)
    async with (
        asyncio.timeout(SOON),
        upstream.serving() as up,
        relay_in_process(tmp_path / "relay", up) as (url, catalog),
        client([url], tmp_path / "cache", limits=limits) as downstream,
    ):
        seen: list[int] = []
        got_two = asyncio.Event()

        def on_progress(progress: Progress) -> None:
            seen.append(progress.done)
            if len(allowed) == 2 and progress.done >= sum(len(version.shard_bytes(each) or b"") for each in allowed):
                got_two.set()

        await downstream.head(wait_s=SOON)
        fetching = asyncio.create_task(downstream.fetch(0, on_progress=on_progress))
        await got_two.wait()
        assert catalog.store.versions == [] and not release.is_set()
        release.set()
        assert_same(await fetching, version)
        assert seen == sorted(seen)
    assert Counter(upstream.asked).most_common(1)[0][1] == 1  # the relay asked upstream once for each shard


async def test_a_newer_version_is_begun_while_an_older_one_still_comes(tmp_path: Path) -> None:
    old, new = make_version(tmp_path / "v1", 1), make_version(tmp_path / "v2", 2)
    held, release = asyncio.Event(), asyncio.Event()

    async def hold(request: web.Request, data: bytes) -> web.StreamResponse:
        held.set()
        await release.wait()
        return serve_range(request, data)

    patient = ClientLimits(read_timeout_s=SOON, shard_wait_s=SOON, deadline_s=SOON)
    upstream = FakeSource(old, shard=hold)
    async with (
        asyncio.timeout(SOON),
        upstream.serving() as up,
        relay_in_process(tmp_path / "relay", up, limits=patient) as (url, catalog),
        client([url], tmp_path / "cache") as worker,
    ):
        await held.wait()
        upstream.version, upstream.older, upstream.shard = new, old, None
        head = await worker.head(after=1, wait_s=SOON)
        assert head is not None and head.version == 2
        assert_same(await worker.fetch(2, new.digest), new)
        await whole(catalog, 2)
        assert catalog.store.versions == [2]
        release.set()
        await whole(catalog, 1)


async def test_a_relay_pulls_older_versions_through_and_survives_upstream_loss(tmp_path: Path) -> None:
    old, new = make_version(tmp_path / "v0", 0), make_version(tmp_path / "v5", 5)
    async with asyncio.timeout(SOON), origin_in_process(tmp_path / "origin") as (origin_url, origin):
        for version in (old, new):
            number = version.manifest.policy_version
            version.folder.rename(incoming_folder(tmp_path / "origin", number))
            version.folder = origin.catalog.store.root / "versions" / f"{number}-{version.digest.short}"
            await announce(origin_url, version.envelope)
        async with relay_in_process(tmp_path / "relay", origin_url) as (url, catalog):
            async with client([url], tmp_path / "cache") as downstream:
                head = await downstream.head(wait_s=SOON)
                assert head is not None and head.version == 5
                assert_same(await downstream.fetch(0), old)
                assert_same(await downstream.fetch(5), new)
            with pytest.raises(SourceFault, match=rf"no source has version 3: {url}: its newest is 5$"):
                async with client([url], tmp_path / "cache") as downstream:
                    await downstream.fetch(3)
            assert catalog.store.versions == [0, 5]


async def test_a_version_on_its_way_is_not_collected_when_a_newer_one_completes(tmp_path: Path) -> None:
    old, new = make_version(tmp_path / "v1", 1), make_version(tmp_path / "v9", 9)
    release, held = asyncio.Event(), asyncio.Event()

    async def hold(request: web.Request, data: bytes) -> web.StreamResponse:
        if data != (old.folder / "config.json").read_bytes():  # which the newer version has as well
            held.set()
            await release.wait()
        return serve_range(request, data)

    patient = ClientLimits(read_timeout_s=SOON, shard_wait_s=SOON, deadline_s=SOON)
    # Two upstreams: the relay follows the one with version 9; version 1 comes, slowly, from the other.
    async with (
        asyncio.timeout(SOON),
        FakeSource(old, shard=hold).serving() as slow,
        FakeSource(new).serving() as fast,
        relay_in_process(tmp_path / "relay", fast, slow, limits=patient) as (url, catalog),
        client([url], tmp_path / "cache", limits=patient) as downstream,
    ):
        assert_same(await downstream.fetch(9, new.digest), new)
        fetching = asyncio.create_task(downstream.fetch(1))
        await held.wait()
        await asyncio.to_thread(catalog.store.collect, required=(), keep_last=1)
        release.set()
        assert_same(await fetching, old)
        assert catalog.store.versions == [1, 9]


async def test_mistakes_on_the_command_line_are_one_line_and_status_2(tmp_path: Path) -> None:
    key = ("--trainer-key", TRAINER.key_id)
    data = ("--data-dir", str(tmp_path / "data"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        results = await asyncio.gather(
            run_command("origin", *data, *key, "--port", port),
            run_command("relay", "--origin", "nonsense", *key, "--data-dir", str(tmp_path / "r")),
            run_command("fetch", "--source", "http://x", "--trainer-key", "ed25519:1", "--out", str(tmp_path / "f")),
        )
    for (status, out, err), said in zip(
        results, ("choose another --port", "not a source URL", "not a trainer key"), strict=True
    ):
        assert status == 2 and said in err and out == "", (status, err)
        assert len(err.strip().splitlines()) == 1
    status, _, err = await run_command("status", "http://127.0.0.1:9")
    assert status == 1 and "can't be asked" in err and "Traceback" not in err
