"""Versions that travel packed: made while they come, checked, passed on, and done without where they are of no use."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from protocol.errors import UserError
from protocol.manifest import sign_manifest
from shardcast import partial as partial_module
from shardcast.client import Progress, Way
from shardcast.delta.encode import packed_section
from shardcast.layout import incoming_packed
from shardcast.partial import DiskFullError, PartialVersion
from shardcast.publish import publish_version
from shardcast.storage import VersionStore
from shardcast.swarm import Swarm, SwarmConfig
from tests.shardcast_network import (
    KEYS,
    SHARD,
    SOON,
    TRAINER,
    Version,
    origin_in_process,
    relay_in_process,
    until,
    whole,
)
from tests.shardcast_run import LIMITS, Run, count, fetching, sent
from tests.unit.shardcast.delta.versions import safetensors, words


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Version 0 is a keyframe, 1 has a delta to it, and both are to be had packed."""
    made = Run(tmp_path / "run")
    made.add(packed=True)
    made.add(packed=True)
    return made


def packed_bytes(version: Version) -> int:
    assert version.manifest.packed is not None
    return version.manifest.packed.size


async def test_who_has_no_base_fetches_it_packed(tmp_path: Path, run: Run) -> None:
    data = tmp_path / "data"
    async with asyncio.timeout(SOON), origin_in_process(data) as (url, origin):
        await run.publish(url, data, range(2))
        async with fetching(url, tmp_path / "c") as fetcher:
            assert await fetcher.fetch(run.versions[1]) is Way.PACKED
            size = packed_bytes(run.versions[1])
            assert sent(origin) == size < 0.7 * run.versions[1].manifest.total_bytes
            assert fetcher.progress[-1] == Progress(size, size, Way.PACKED)
            assert fetcher.fallbacks() == {} and count(fetcher.metrics, "versions", way="packed") == 1
    left = [each.name for each in (tmp_path / "c" / "partial").iterdir()]
    assert left == [] and list((tmp_path / "c" / "packed").iterdir()) == []


async def test_who_has_the_base_takes_the_delta_which_is_less(tmp_path: Path, run: Run) -> None:
    data = tmp_path / "data"
    async with asyncio.timeout(SOON), origin_in_process(data) as (url, _):
        await run.publish(url, data, range(2))
        async with fetching(url, tmp_path / "c") as fetcher:
            assert await fetcher.fetch(run.versions[0]) is Way.PACKED
            assert await fetcher.fetch(run.versions[1]) is Way.DELTA


async def test_a_relay_passes_the_packed_form_on_while_it_comes(tmp_path: Path, run: Run) -> None:
    data = tmp_path / "data"
    async with asyncio.timeout(SOON), origin_in_process(data) as (origin_url, origin):
        await run.publish(origin_url, data, range(1))
        async with (
            relay_in_process(tmp_path / "relay", origin_url, limits=LIMITS) as (url, relay),
            fetching(url, tmp_path / "c") as fetcher,
        ):
            assert await fetcher.fetch(run.versions[0]) is Way.PACKED
            await whole(relay, 0)
            assert sent(origin) == packed_bytes(run.versions[0])
            assert count(relay.metrics, "versions", way="packed") == 1
    again = VersionStore(tmp_path / "relay", KEYS)
    section = run.versions[0].manifest.packed
    assert section is not None and again.holds(section.digest)
    again.remove([0])
    assert list((tmp_path / "relay" / "packed").iterdir()) == []


async def test_a_relay_that_took_the_delta_gets_the_packed_form_when_a_client_asks(tmp_path: Path, run: Run) -> None:
    data = tmp_path / "data"
    async with asyncio.timeout(2 * SOON), origin_in_process(data) as (origin_url, origin):
        await run.publish(origin_url, data, range(1))
        async with relay_in_process(tmp_path / "relay", origin_url, limits=LIMITS) as (url, relay):
            await whole(relay, 0)
            before = sent(origin)
            await run.publish(origin_url, data, [1])
            await whole(relay, 1)
            assert sent(origin) - before == run.versions[1].manifest.delta.size  # type: ignore[union-attr]
            for number in range(2):
                async with fetching(url, tmp_path / f"c{number}") as fetcher:
                    assert await fetcher.fetch(run.versions[1]) is Way.PACKED
            delta = run.versions[1].manifest.delta
            assert delta is not None
            assert sent(origin) - before == delta.size + packed_bytes(run.versions[1])


@pytest.mark.parametrize("damage", ["format", "result"])
async def test_a_signed_packed_form_that_is_wrong_harms_nobody(tmp_path: Path, run: Run, damage: str) -> None:
    version = run.versions[0]
    blob = run.packed(0)
    data = bytearray(blob.read_bytes())
    at = 20 if damage == "format" else len(data) - 5
    data[at] ^= 0xFF
    blob.write_bytes(data)
    manifest = replace(version.manifest, packed=packed_section(blob, SHARD), torrent_info_hash=None)
    run.versions[0] = replace(version, manifest=manifest, envelope=sign_manifest(manifest, TRAINER), torrent=None)
    folder = tmp_path / "data"
    async with asyncio.timeout(SOON), origin_in_process(folder) as (url, origin):
        await run.publish(url, folder, range(1))
        async with fetching(url, tmp_path / "c") as fetcher:
            way = await fetcher.fetch(run.versions[0])
            assert way is (Way.FULL if damage == "format" else Way.MIXED)
            assert fetcher.fallbacks() == {"blob_wrong": 1}
        assert origin.catalog.reports.counts["blob_wrong"] == 1


async def test_a_packed_form_that_no_source_has_is_done_without(tmp_path: Path, run: Run) -> None:
    data = tmp_path / "data"
    async with asyncio.timeout(SOON), origin_in_process(data) as (url, origin):
        await run.publish(url, data, range(1))
        origin.catalog.store.packed.remove(0)
        async with fetching(url, tmp_path / "c") as fetcher:
            assert await fetcher.fetch(run.versions[0]) is Way.FULL
            assert fetcher.fallbacks() == {"blob_absent": 1}


async def test_no_room_for_both_means_the_files(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = PartialVersion.open

    def full(self: PartialVersion) -> None:
        if self.folder.name.endswith(".packed"):
            raise DiskFullError("full")
        opened(self)

    data = tmp_path / "data"
    async with asyncio.timeout(SOON), origin_in_process(data) as (url, _):
        await run.publish(url, data, range(1))
        monkeypatch.setattr(partial_module.PartialVersion, "open", full)
        async with fetching(url, tmp_path / "c") as fetcher:
            assert await fetcher.fetch(run.versions[0]) is Way.FULL
            assert fetcher.fallbacks() == {"no_room": 1}


async def test_what_came_of_it_is_not_fetched_again(tmp_path: Path, run: Run) -> None:
    """A first client is cancelled midway; the second goes on with the blob's shards that were verified."""
    data = tmp_path / "data"
    async with asyncio.timeout(SOON), origin_in_process(data) as (url, origin):
        await run.publish(url, data, range(1))
        some = asyncio.Event()
        async with fetching(url, tmp_path / "c") as fetcher:
            version = run.versions[0]

            def look(progress: Progress) -> None:
                if progress.done > progress.total / 2:
                    some.set()

            fetching_it = asyncio.create_task(fetcher.client.fetch(0, version.digest, look))
            await some.wait()
            fetching_it.cancel()
            await asyncio.gather(fetching_it, return_exceptions=True)
        before = sent(origin)
        async with fetching(url, tmp_path / "c") as fetcher:
            assert await fetcher.fetch(version) in (Way.PACKED, Way.FULL)
            assert sent(origin) - before < packed_bytes(version)


async def test_noise_is_published_without_a_packed_form_and_weights_with_one(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 2**16, 100_000).astype(np.uint16)
    data = tmp_path / "data"
    async with asyncio.timeout(SOON), origin_in_process(data) as (url, origin):
        for number, weights in enumerate((noise, words(100_000))):
            folder = tmp_path / f"v{number}"
            folder.mkdir()
            (folder / "model.safetensors").write_bytes(safetensors({"w": ("BF16", weights.tobytes())}))
            await publish_version(
                folder, data, TRAINER, origin_url=url, run_id="run", policy_version=number, shard_bytes=SHARD
            )
            stored = origin.catalog.store.get(number)
            assert stored is not None and (stored.manifest.packed is not None) == (number == 1)


async def test_the_origin_takes_a_packed_version_only_with_its_blob(tmp_path: Path, run: Run) -> None:
    data = tmp_path / "data"
    async with asyncio.timeout(SOON), origin_in_process(data) as (url, origin):
        run.packed(0).write_bytes(b"short")
        with pytest.raises(UserError, match="should have"):
            await run.publish(url, data, range(1))
        assert origin.catalog.head is None
        assert incoming_packed(data, 0).exists()


async def test_clients_swap_the_packed_form_and_go_on_seeding_it(tmp_path: Path, run: Run) -> None:
    data = tmp_path / "data"
    async with asyncio.timeout(2 * SOON), origin_in_process(data, help_peers=True) as (url, _):
        await run.publish(url, data, range(1))
        async with fetching(url, tmp_path / "a", Swarm(SwarmConfig(port=0))) as fetcher:
            assert await fetcher.fetch(run.versions[0]) is Way.PACKED
            assert fetcher.client.swapped == [0]
            section = run.versions[0].manifest.packed
            assert section is not None and fetcher.client.store.holds(section.digest)


async def test_a_restarted_client_seeds_what_it_holds(tmp_path: Path, run: Run) -> None:
    data = tmp_path / "data"
    async with asyncio.timeout(2 * SOON), origin_in_process(data, help_peers=True) as (url, _):
        await run.publish(url, data, range(1))
        async with fetching(url, tmp_path / "a", Swarm(SwarmConfig(port=0))) as fetcher:
            await fetcher.fetch(run.versions[0])
        async with fetching(url, tmp_path / "a", Swarm(SwarmConfig(port=0))) as fetcher:
            await fetcher.client.head()
            await until(lambda: fetcher.client.swapped == [0])
