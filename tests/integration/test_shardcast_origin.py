"""The origin and the HTTP surface."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from protocol.errors import UserError
from protocol.manifest import (
    Digest,
)
from protocol.signing import Identity
from protocol.terms import WELL_KNOWN_PATH
from shardcast.catalog import Catalog
from shardcast.config import ServerLimits
from shardcast.discovery import Coordinator
from shardcast.layout import incoming_folder
from shardcast.listen import listening
from shardcast.metrics import ShardcastMetrics
from shardcast.names import VersionConflict
from shardcast.publish import announce, next_version
from shardcast.server import ShardcastApp
from shardcast.storage import VersionStore
from shardcast.uplink import Uplink
from tests.factories import make_terms
from tests.shardcast_network import (
    KEYS,
    SOON,
    STRANGER,
    TRAINER,
    Version,
    client,
    make_version,
    names_below,
    origin_in_process,
)


async def test_the_origin_takes_a_number_once_and_only_from_the_pinned_key(tmp_path: Path) -> None:
    data = tmp_path / "data"

    async def put(name: str, version: int, seed: int = 0, signer: Identity = TRAINER) -> Version:
        made = make_version(tmp_path / name, version, seed, signer)
        target = incoming_folder(data, version)
        if not target.exists():
            made.folder.rename(target)
        return made

    async with asyncio.timeout(SOON), origin_in_process(data) as (url, origin):
        with pytest.raises(UserError, match=r"403.*pins"):
            await announce(url, (await put("forged", 4, signer=STRANGER)).envelope)
        assert await next_version(url) == 0
        good = await put("good", 4)
        assert await announce(url, good.envelope) is True
        assert await announce(url, good.envelope) is False
        with pytest.raises(VersionConflict, match=r"409.*for ever"):
            await announce(url, (await put("other", 4, seed=1)).envelope)
        with pytest.raises(VersionConflict, match=r"409.*publish as 5"):
            await announce(url, (await put("older", 3)).envelope)
        with pytest.raises(UserError, match="400"):
            await announce(url, make_version(tmp_path / "nofiles", 6).envelope)
        assert origin.catalog.head is not None and origin.catalog.head.version == 4
        origin.catalog.store.remove([4])
        assert await next_version(url) == 5
    async with asyncio.timeout(SOON), origin_in_process(data) as (url, _):
        with pytest.raises(VersionConflict, match="for ever"):  # also after the files are gone and a restart
            await announce(url, (await put("another", 4, seed=2)).envelope)


async def test_what_the_run_needs_is_kept_and_everything_is_while_the_coordinator_is_away(tmp_path: Path) -> None:
    named: list[str | None] = [None]

    async def required(request: web.Request) -> web.Response:
        return web.json_response({"versions": [1]})

    async def terms(request: web.Request) -> web.Response:
        return web.Response(text=make_terms(model_digest=named[0]).to_json())

    app = web.Application()
    app.router.add_get("/api/v1/versions/required", required)
    app.router.add_get(WELL_KNOWN_PATH, terms)
    data = tmp_path / "data"
    async with asyncio.timeout(SOON):
        async with (
            listening(app, "127.0.0.1", 0, ServerLimits()) as url,
            origin_in_process(data, coordinator=Coordinator(url)) as (origin_url, origin),
        ):
            for number in range(6):
                made = make_version(tmp_path / f"made{number}", number)
                made.folder.rename(incoming_folder(data, number))
                await announce(origin_url, made.envelope)
                named[0] = named[0] or str(made.digest)
            assert await origin.collect() == [2, 3]  # 0 is the model that the terms name
            named[0] = None
            assert await origin.collect() == [0]
        async with origin_in_process(data, coordinator=Coordinator(url)) as (_, origin):
            assert await origin.collect() == []
            assert origin.catalog.store.versions == [1, 4, 5]


async def test_the_http_surface(tmp_path: Path) -> None:
    data = tmp_path / "data"
    version = make_version(tmp_path / "v0")
    async with asyncio.timeout(SOON), origin_in_process(data) as (url, _), aiohttp.ClientSession() as session:
        waiting = asyncio.create_task(session.get(f"{url}/v1/head?wait=20"))
        assert (await session.get(f"{url}/v1/head")).status == 204
        version.folder.rename(incoming_folder(data, 0))
        await announce(url, version.envelope)
        assert (await (await waiting).json()) == {"version": 0, "manifest_digest": version.digest}
        assert (await session.get(f"{url}/v1/head?after=0&wait=0.01")).status == 204
        shard = version.manifest.shards[1]
        address = f"{url}/v1/shards/{shard.digest}"
        whole = await session.get(address)
        body = await whole.read()
        assert Digest.of(body) == shard.digest
        assert whole.headers["ETag"] == f'"{shard.digest}"' and "immutable" in whole.headers["Cache-Control"]
        part = await session.get(address, headers={"Range": "bytes=10-19"})
        assert (part.status, await part.read()) == (206, body[10:20])
        assert part.headers["Content-Range"] == f"bytes 10-19/{shard.size}"
        tail = await session.get(address, headers={"Range": "bytes=-5"})
        assert (tail.status, await tail.read()) == (206, body[-5:])
        for headers, status in (
            ({"Range": f"bytes={shard.size}-"}, 416),
            ({"Range": "bytes=x"}, 416),
            ({"If-None-Match": f'"{shard.digest}"'}, 304),
        ):
            assert (await session.get(address, headers=headers)).status == status
        head = await session.head(address)
        assert (head.status, head.headers["Content-Length"]) == (200, str(shard.size))
        for path, status in (
            ("/v1/shards/rubbish", 400),
            (f"/v1/shards/{Digest.of(b'unknown')}", 404),
            ("/v1/manifests/1", 404),
            ("/v1/manifests/x", 400),
            ("/v1/manifests/..%2f..%2fnames", 400),
            ("/v1/head?after=x", 400),
            ("/healthz", 200),
            ("/", 200),
        ):
            assert (await session.get(url + path)).status == status, path


async def test_every_byte_of_a_shard_passes_the_bandwidth_cap(tmp_path: Path) -> None:
    taken: list[int] = []

    class Recorder(Uplink):
        async def turn(self, address: str, count: int, gone: Callable[[], bool]) -> bool:
            taken.append(count)
            return True

    version = make_version(tmp_path / "v0")
    store = VersionStore(tmp_path / "data", KEYS)
    version.folder.rename(incoming_folder(store.root, 0))
    stored = store.adopt(incoming_folder(store.root, 0), version.envelope, version.manifest)
    app = ShardcastApp(Catalog(store, ShardcastMetrics()), ServerLimits(), Recorder(1e9)).build()
    async with (
        asyncio.timeout(SOON),
        listening(app, "127.0.0.1", 0, ServerLimits(shutdown_s=0.1)) as url,
        client([url], tmp_path / "cache") as capped,
    ):
        path = await capped.fetch(0)
    assert names_below(path) == names_below(stored.path)
    assert sum(taken) == version.manifest.total_bytes


async def test_too_many_requests_from_one_address_are_refused(tmp_path: Path) -> None:
    catalog = Catalog(VersionStore(tmp_path, KEYS), ShardcastMetrics())
    app = ShardcastApp(catalog, ServerLimits(max_requests_per_address=2)).build()
    async with (
        asyncio.timeout(SOON),
        listening(app, "127.0.0.1", 0, ServerLimits(shutdown_s=0.1)) as url,
        aiohttp.ClientSession() as session,
    ):
        waiting = [asyncio.create_task(session.get(f"{url}/v1/head?wait=20")) for _ in range(2)]
        while (await session.get(f"{url}/healthz")).status != 503:
            assert not any(task.done() for task in waiting)
        catalog.close()
        assert [(await task).status for task in waiting] == [204, 204]
