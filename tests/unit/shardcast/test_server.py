from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from shardcast.catalog import Catalog
from shardcast.config import ServerLimits
from shardcast.metrics import ShardcastMetrics
from shardcast.server import ShardcastApp
from shardcast.storage import VersionStore
from tests.factories import TRAINER


@pytest.mark.parametrize("query", ["wait=nan", "wait=x", "after=x", "after=" + "9" * 5000])
async def test_a_head_is_asked_for_with_numbers(tmp_path: Path, query: str) -> None:
    catalog = Catalog(VersionStore(tmp_path, [TRAINER.key_id]), ShardcastMetrics())
    async with TestClient(TestServer(ShardcastApp(catalog, ServerLimits()).build())) as client:
        assert (await client.get(f"/v1/head?{query}")).status == 400
        assert (await client.get("/v1/head?wait=-inf")).status == 204
