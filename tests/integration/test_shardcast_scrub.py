"""A relay whose disk forgets mends itself, and what it serves meanwhile is right or absent."""

from __future__ import annotations

import asyncio
from pathlib import Path

from shardcast.scrub import Scrubber
from tests.shardcast_network import (
    SOON,
    assert_same,
    client,
    make_version,
    origin_in_process,
    publish,
    relay_in_process,
    whole,
)


async def test_a_rotten_shard_is_found_and_fetched_anew(tmp_path: Path) -> None:
    made = make_version(tmp_path / "v0")
    async with (
        asyncio.timeout(2 * SOON),
        origin_in_process(tmp_path / "data") as (origin_url, origin),
        relay_in_process(tmp_path / "relay", origin_url) as (url, relay),
    ):
        version = await publish(origin_url, origin, made)
        await whole(relay, 0)
        stored = relay.store.get(0)
        assert stored is not None
        path = stored.path / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[70_000] ^= 0xFF
        path.write_bytes(data)
        before = origin.catalog.metrics.bytes_sent
        scrubber = Scrubber(relay.store, relay.metrics, relay.refetch, bytes_per_s=1e12, pause_s=0.01)
        scrubbing = asyncio.create_task(scrubber.run())
        try:
            await relay.changed.wait_until(lambda: relay.metrics.rotten_shards._value.get() == 1, SOON)
            await whole(relay, 0)
        finally:
            scrubbing.cancel()
            await asyncio.gather(scrubbing, return_exceptions=True)
        mended = relay.store.get(0)
        assert mended is not None
        assert_same(mended.path, version)
        assert origin.catalog.metrics.bytes_sent - before == version.manifest.shards[1].size or mended is not stored
        async with client([url], tmp_path / "c") as fetcher:
            assert_same(await fetcher.fetch(0), version)
