"""`POST /v1/next`: a shard counts as given only once it was sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from shardcast.catalog import Catalog
from shardcast.config import ServerLimits
from shardcast.layout import incoming_folder
from shardcast.listen import listening
from shardcast.metrics import ShardcastMetrics
from shardcast.peer_server import PeerService
from shardcast.quota import MonthlyQuota
from shardcast.server import ShardcastApp
from shardcast.sources import SHARD_HEADER
from shardcast.storage import VersionStore
from tests.shardcast_network import KEYS, SHARD, SOON, make_version

ONE = (1 << 3).to_bytes(2, "little")  # wants shard 3


@asynccontextmanager
async def serving(tmp_path: Path, quota: MonthlyQuota | None = None) -> AsyncIterator[str]:
    version = make_version(tmp_path / "v0")
    store = VersionStore(tmp_path / "data", KEYS)
    version.folder.rename(incoming_folder(store.root, 0))
    store.adopt(incoming_folder(store.root, 0), version.envelope, version.manifest)
    serves = ShardcastApp(Catalog(store, ShardcastMetrics()), ServerLimits(), quota=quota)
    app = serves.build()
    PeerService(serves).add_to(app)
    async with asyncio.timeout(SOON), listening(app, "127.0.0.1", 0, ServerLimits(shutdown_s=0.1)) as url:
        yield f"{url}/v1/next/0"


@pytest.mark.parametrize("header", [("If-None-Match", "*"), ("Range", "bytes=999999999-"), ("Range", "bytes=5-9")])
async def test_headers_that_ask_for_less_change_nothing(tmp_path: Path, header: tuple[str, str]) -> None:
    async with serving(tmp_path) as url, aiohttp.ClientSession() as session:
        answer = await session.post(url, data=ONE, headers=dict([header]))
        assert (answer.status, answer.headers[SHARD_HEADER]) == (200, "3")
        assert len(await answer.read()) == SHARD
        assert (await session.post(url, data=ONE)).status == 204  # it was given


async def test_what_was_refused_was_not_given(tmp_path: Path) -> None:
    quota = MonthlyQuota(tmp_path / "month.json", 0)
    async with serving(tmp_path, quota) as url, aiohttp.ClientSession() as session:
        assert (await session.post(url, data=ONE)).status == 503
        quota.limit_bytes = 10**9
        assert (await session.post(url, data=ONE)).status == 200


async def test_what_was_cut_was_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def cut(self: ShardcastApp, *_: object) -> None:
        raise ConnectionResetError("the client went away")

    async with serving(tmp_path) as url, aiohttp.ClientSession() as session:
        with monkeypatch.context() as patch, pytest.raises(aiohttp.ClientError):
            patch.setattr(ShardcastApp, "_send_slice", cut)
            await (await session.post(url, data=ONE)).read()
        assert (await session.post(url, data=ONE)).status == 200
