"""Deltas over real sockets: what a client holds decides what it fetches, and nothing that fails leaves a wrong byte."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from protocol.manifest import sign_manifest
from shardcast.client import Progress, Way
from shardcast.delta.encode import delta_section
from shardcast.layout import incoming_delta, incoming_folder
from shardcast.partial import DiskFullError
from shardcast.publish import announce, stage
from shardcast.storage import VersionStore
from tests.shardcast_network import (
    KEYS,
    SHARD,
    SOON,
    TRAINER,
    Version,
    assert_same,
    origin_in_process,
    process,
    ready_url,
    relay_in_process,
    run_command,
)
from tests.shardcast_run import LIMITS, Run, count, fetching, sent


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path / "run")
    for _ in range(4):
        made.add()
    return made


async def test_who_has_the_base_fetches_the_delta_alone(tmp_path: Path, run: Run) -> None:
    data = tmp_path / "data"
    async with (
        asyncio.timeout(SOON),
        origin_in_process(data) as (url, origin),
        fetching(url, tmp_path / "c") as fetcher,
    ):
        await run.publish(url, data, range(2))
        assert await fetcher.fetch(run.versions[0]) is Way.FULL
        before = sent(origin)
        assert await fetcher.fetch(run.versions[1]) is Way.DELTA
        delta = run.versions[1].manifest.delta
        assert delta is not None and sent(origin) - before == delta.size
        assert fetcher.progress[-1] == Progress(delta.size, delta.size, Way.DELTA)
        assert count(fetcher.metrics, "versions", way="delta") == 1
        assert fetcher.fallbacks() == {}
    assert list((tmp_path / "c" / "partial").iterdir()) == []
    assert list((tmp_path / "c" / "deltas").iterdir()) == []


async def test_a_version_that_changed_nothing_is_a_version_and_costs_nothing(tmp_path: Path) -> None:
    run, data = Run(tmp_path / "run"), tmp_path / "data"
    for _ in range(3):
        run.add(change=False)
    async with (
        asyncio.timeout(SOON),
        origin_in_process(data) as (url, origin),
        fetching(url, tmp_path / "c") as fetcher,
    ):
        await run.publish(url, data, range(3))
        await fetcher.fetch(run.versions[0])
        before = sent(origin)
        for version in run.versions[1:]:
            assert await fetcher.fetch(version) is Way.DELTA
        assert sent(origin) - before < 500
        origin.catalog.store.remove([1])  # its delta has the same bytes as version 2's
        assert origin.catalog.store.locate(run.versions[2].manifest.delta.shards[0].digest)  # type: ignore[union-attr]


async def test_who_is_behind_fetches_the_chain_and_no_version_between(tmp_path: Path, run: Run) -> None:
    data = tmp_path / "data"
    async with (
        asyncio.timeout(SOON),
        origin_in_process(data) as (url, origin),
        fetching(url, tmp_path / "c") as fetcher,
    ):
        await run.publish(url, data, range(1))
        await fetcher.fetch(run.versions[0])
        await run.publish(url, data, range(1, 4))
        before = sent(origin)
        assert await fetcher.fetch(run.versions[3]) is Way.DELTA
        assert sent(origin) - before == sum(v.manifest.delta.size for v in run.versions[1:] if v.manifest.delta)
        assert fetcher.client.store.versions == [0, 3]


async def test_a_pruned_chain_means_full(tmp_path: Path, run: Run) -> None:
    data = tmp_path / "data"
    async with (
        asyncio.timeout(SOON),
        origin_in_process(data) as (url, origin),
        fetching(url, tmp_path / "c") as fetcher,
    ):
        await run.publish(url, data, range(1))
        await fetcher.fetch(run.versions[0])
        await run.publish(url, data, range(1, 4))
        origin.catalog.store.remove([1, 2])
        assert await fetcher.fetch(run.versions[3]) is Way.FULL
        assert fetcher.fallbacks() == {}


async def test_a_keyframe_is_fetched_in_full(tmp_path: Path, run: Run) -> None:
    data = tmp_path / "data"
    keyframe = run.add(delta=False)
    async with asyncio.timeout(SOON), origin_in_process(data) as (url, _), fetching(url, tmp_path / "c") as fetcher:
        await run.publish(url, data, (3, 4))
        await fetcher.fetch(run.versions[3])
        assert await fetcher.fetch(keyframe) is Way.FULL


async def test_a_version_with_the_bases_number_and_another_digest_is_no_base(tmp_path: Path, run: Run) -> None:
    """As after a fork: version 0 is here, but it is not the one that version 1 is the difference to."""
    data, other = tmp_path / "data", Run(tmp_path / "other", seed=7)
    other.add()
    cache = VersionStore(tmp_path / "c", KEYS, durable=False)
    await stage(other.versions[0].folder, tmp_path / "c", 0, move=False)
    cache.adopt(incoming_folder(tmp_path / "c", 0), other.versions[0].envelope, other.versions[0].manifest)
    async with asyncio.timeout(SOON), origin_in_process(data) as (url, _), fetching(url, tmp_path / "c") as fetcher:
        await run.publish(url, data, range(2))
        assert await fetcher.fetch(run.versions[1]) is Way.FULL


def flip(path: Path, at: int) -> None:
    """Damage a byte on the disk."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0xFF]))


async def test_a_damaged_base_costs_the_damaged_shards_and_is_told(tmp_path: Path, run: Run) -> None:
    data = tmp_path / "data"
    async with (
        asyncio.timeout(SOON),
        origin_in_process(data) as (url, origin),
        fetching(url, tmp_path / "c") as fetcher,
    ):
        await run.publish(url, data, range(2))
        await fetcher.fetch(run.versions[0])
        base = fetcher.client.store.get(0)
        assert base is not None
        flip(base.path / "model.safetensors", 3 * SHARD + 5)
        before = sent(origin)
        assert await fetcher.fetch(run.versions[1]) is Way.MIXED
        delta = run.versions[1].manifest.delta
        assert delta is not None and sent(origin) - before == delta.size + SHARD
        assert fetcher.fallbacks() == {"result_differs": 1}
        assert fetcher.progress[-1].way is Way.MIXED
        assert fetcher.client.store.versions == [0, 1]
        await fetcher.client.close()  # which waits until it has been told
        assert origin.catalog.health()["delta_fallbacks"] == ["1 × result_differs"]
        assert count(origin.catalog.metrics, "reported_delta_fallbacks", reason="result_differs") == 1


async def test_a_base_whose_files_are_gone_is_done_without(tmp_path: Path, run: Run) -> None:
    data = tmp_path / "data"
    async with asyncio.timeout(SOON), origin_in_process(data) as (url, _), fetching(url, tmp_path / "c") as fetcher:
        await run.publish(url, data, range(2))
        await fetcher.fetch(run.versions[0])
        (fetcher.client.store.get(0).path / "model.safetensors").unlink()  # type: ignore[union-attr]
        assert await fetcher.fetch(run.versions[1]) is Way.FULL
        assert fetcher.fallbacks() == {"base_unreadable": 1}


async def test_a_delta_that_no_source_has_is_done_without(tmp_path: Path, run: Run) -> None:
    data = tmp_path / "data"
    async with (
        asyncio.timeout(SOON),
        origin_in_process(data) as (url, origin),
        fetching(url, tmp_path / "c") as fetcher,
    ):
        await run.publish(url, data, range(2))
        await fetcher.fetch(run.versions[0])
        origin.catalog.store.blobs.remove(1)
        assert await fetcher.fetch(run.versions[1]) is Way.FULL
        assert fetcher.fallbacks() == {"blob_absent": 1}


@pytest.mark.parametrize("damage", ["format", "content"])
async def test_a_signed_delta_that_is_wrong_harms_nobody(tmp_path: Path, run: Run, damage: str) -> None:
    """The trainer's own mistake: the blob is what the manifest says, and doesn't make the version."""
    data, blob = tmp_path / "data", run.blob(1)
    flip(blob, 3 if damage == "format" else blob.stat().st_size - 1)
    made = run.versions[1]
    assert made.manifest.delta is not None
    section = delta_section(blob, 0, run.versions[0].digest, SHARD)
    manifest = replace(made.manifest, delta=section)
    run.versions[1] = Version(made.folder, manifest, sign_manifest(manifest, TRAINER))
    async with asyncio.timeout(SOON), origin_in_process(data) as (url, _), fetching(url, tmp_path / "c") as fetcher:
        await run.publish(url, data, range(2))
        await fetcher.fetch(run.versions[0])
        way = await fetcher.fetch(run.versions[1])
        assert (way, fetcher.fallbacks()) == (
            (Way.FULL, {"blob_wrong": 1}) if damage == "format" else (Way.MIXED, {"result_differs": 1})
        )


async def test_a_delta_in_a_codec_of_tomorrow_is_left_alone(tmp_path: Path, run: Run) -> None:
    data, made = tmp_path / "data", run.versions[1]
    assert made.manifest.delta is not None
    manifest = replace(made.manifest, delta=replace(made.manifest.delta, codec="words-2"))
    run.versions[1] = Version(made.folder, manifest, sign_manifest(manifest, TRAINER))
    async with asyncio.timeout(SOON), origin_in_process(data) as (url, _), fetching(url, tmp_path / "c") as fetcher:
        await run.publish(url, data, range(2))
        await fetcher.fetch(run.versions[0])
        assert await fetcher.fetch(run.versions[1]) is Way.FULL


async def test_a_full_disk_leaves_the_old_version_and_a_resumable_new_one(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    written = 0

    def full(descriptor: int, buffer: bytes, offset: int) -> int:
        nonlocal written
        written += 1
        if written > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, buffer, offset)

    pwrite = os.pwrite
    async with asyncio.timeout(SOON), origin_in_process(data) as (url, _), fetching(url, tmp_path / "c") as fetcher:
        await run.publish(url, data, range(2))
        await fetcher.fetch(run.versions[0])
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", full)
            with pytest.raises(DiskFullError, match="make room"):
                await fetcher.fetch(run.versions[1])
        assert fetcher.client.store.versions == [0]
        assert_same(fetcher.client.store.get(0).path, run.versions[0])  # type: ignore[union-attr]
        assert await fetcher.fetch(run.versions[1]) is Way.DELTA


# Relays


async def test_a_relay_applies_deltas_itself_and_passes_both_on(tmp_path: Path, run: Run) -> None:
    data = tmp_path / "data"
    async with asyncio.timeout(SOON), origin_in_process(data) as (origin_url, origin):
        await run.publish(origin_url, data, range(1))
        async with (
            relay_in_process(tmp_path / "relay", origin_url, limits=LIMITS) as (url, relay),
            fetching(url, tmp_path / "old") as old,
            fetching(url, tmp_path / "new") as new,
        ):
            await old.fetch(run.versions[0])
            before = sent(origin)
            for number in (1, 2):
                await run.publish(origin_url, data, [number])
                assert await old.fetch(run.versions[number]) is Way.DELTA
                await relay.changed.wait_until(lambda number=number: relay.store.get(number) is not None, SOON)
            assert await new.fetch(run.versions[2]) is Way.FULL
            deltas = sum(v.manifest.delta.size for v in run.versions[1:3] if v.manifest.delta)
            assert sent(origin) - before == deltas
            assert count(relay.metrics, "versions", way="delta") == 2


async def test_a_relay_without_the_base_gets_the_delta_all_the_same(tmp_path: Path, run: Run) -> None:
    data = tmp_path / "data"
    async with asyncio.timeout(SOON), origin_in_process(data) as (origin_url, _):
        await run.publish(origin_url, data, range(2))
        async with fetching(origin_url, tmp_path / "c") as direct:
            await direct.fetch(run.versions[0])
        async with (
            relay_in_process(tmp_path / "relay", origin_url, limits=LIMITS) as (url, relay),
            fetching(url, tmp_path / "c") as fetcher,
        ):
            await relay.changed.wait_until(lambda: relay.store.get(1) is not None, SOON)
            assert await fetcher.fetch(run.versions[1]) is Way.DELTA
            assert count(relay.metrics, "versions", way="full") == 1
    again = VersionStore(tmp_path / "relay", KEYS)
    section = run.versions[1].manifest.delta
    assert section is not None and again.holds(section.digest)
    again.remove([1])
    assert list((tmp_path / "relay" / "deltas").iterdir()) == []


async def test_a_chain_is_not_a_reason_for_a_relay_to_fetch_old_versions(tmp_path: Path, run: Run) -> None:
    data = tmp_path / "data"
    async with asyncio.timeout(SOON), origin_in_process(data) as (origin_url, _):
        await run.publish(origin_url, data, range(1))
        async with fetching(origin_url, tmp_path / "c") as direct:
            await direct.fetch(run.versions[0])
        await run.publish(origin_url, data, range(1, 4))
        async with (
            relay_in_process(tmp_path / "relay", origin_url, limits=LIMITS) as (url, relay),
            fetching(url, tmp_path / "c") as fetcher,
        ):
            await relay.changed.wait_until(lambda: relay.store.get(3) is not None, SOON)
            assert await fetcher.fetch(run.versions[3]) is Way.FULL
            assert relay.store.versions == [3]


async def test_a_relay_tells_its_origin_what_its_clients_told_it(tmp_path: Path, run: Run) -> None:
    data = tmp_path / "data"
    async with asyncio.timeout(SOON), origin_in_process(data) as (origin_url, origin):
        await run.publish(origin_url, data, range(2))
        async with relay_in_process(tmp_path / "relay", origin_url, limits=LIMITS) as (url, relay):
            await relay.changed.wait_until(lambda: relay.store.get(1) is not None, SOON)
            async with aiohttp.ClientSession() as session:
                good = {"version": 1, "reason": "base_unreadable"}
                async with session.post(f"{url}/v1/reports", json=good) as response:
                    assert response.status == 204
                for body in (
                    b"{}",
                    b"[1]",
                    b'{"version": 9, "reason": "blob_wrong"}',
                    b"x" * 300,
                    b'{"version":1,"reason":"x"}',
                ):
                    async with session.post(f"{url}/v1/reports", data=body) as response:
                        assert response.status == 400
                statuses = []
                for _ in range(30):
                    async with session.post(f"{url}/v1/reports", json=good) as response:
                        statuses.append(response.status)
                assert set(statuses) == {204, 429}
        assert count(origin.catalog.metrics, "reported_delta_fallbacks", reason="base_unreadable") >= 1
        async with aiohttp.ClientSession() as session, session.get(f"{origin_url}/") as page:
            assert "base_unreadable" in await page.text()


# The origin


async def test_the_origin_takes_a_delta_only_with_its_blob(tmp_path: Path, run: Run) -> None:
    data = tmp_path / "data"
    version = run.versions[1]
    async with asyncio.timeout(SOON), origin_in_process(data) as (url, origin):
        await run.publish(url, data, range(1))
        await stage(version.folder, data, 1, move=False)
        with pytest.raises(Exception, match="it is absent"):
            await announce(url, version.envelope)
        incoming_delta(data, 1).write_bytes(b"short")
        with pytest.raises(Exception, match="it has 5"):
            await announce(url, version.envelope)
        await run.publish(url, data, [1])
        assert origin.catalog.store.versions == [0, 1]
        await stage(version.folder, data, 1, move=False, delta=run.blob(1))
        assert await announce(url, version.envelope) is False
        assert not incoming_delta(data, 1).exists()
    assert VersionStore(data, KEYS).holds(version.manifest.delta.digest)  # type: ignore[union-attr]


# Processes


# Fetches version 1 as `shardcast fetch` does, but says so and waits for ever once three shards are made.
_STUCK = """
import asyncio, sys, threading
from shardcast import obtain
from shardcast.client import ShardcastClient

class Stuck(obtain.Applier):
    def _write(self, index, data):
        if len(self._partial.have) >= 3:
            print("stuck", sorted(self._partial.have), flush=True)
            threading.Event().wait()
        super()._write(index, data)

obtain.Applier = Stuck
url, key, cache = sys.argv[1:]

async def main():
    async with ShardcastClient([url], [key], cache) as client:
        await client.fetch(1)

asyncio.run(main())
"""


async def test_kill_9_while_a_delta_is_applied_then_resumed(tmp_path: Path, run: Run) -> None:
    data, cache = tmp_path / "data", tmp_path / "c"
    async with asyncio.timeout(3 * SOON), origin_in_process(data) as (url, origin):
        await run.publish(url, data, range(2))
        async with fetching(url, cache) as fetcher:
            await fetcher.fetch(run.versions[0])
        started = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _STUCK, url, TRAINER.key_id, str(cache)), stdout=asyncio.subprocess.PIPE
        )
        try:
            assert started.stdout is not None
            line = await started.stdout.readline()
        finally:
            started.kill()
            await started.communicate()
        assert line.startswith(b"stuck")
        store = VersionStore(cache, KEYS, durable=False)
        assert store.versions == [0]
        assert_same(store.get(0).path, run.versions[0])  # type: ignore[union-attr]
        before = sent(origin)
        async with fetching(url, cache) as fetcher:
            assert await fetcher.fetch(run.versions[1]) is Way.DELTA
            assert fetcher.fallbacks() == {}
        assert sent(origin) == before  # what the first process had received was not sent again
        assert list((cache / "partial").iterdir()) == []


async def test_origin_relay_and_clients_as_processes_follow_by_deltas(tmp_path: Path, run: Run) -> None:
    data = tmp_path / "origin"
    key = ("--trainer-key", TRAINER.key_id)
    async with (
        asyncio.timeout(3 * SOON),
        process("origin", "--data-dir", str(data), *key, "--port", "0", log=tmp_path / "o.log") as origin,
    ):
        origin_url = await ready_url(origin)
        await run.publish(origin_url, data, range(1))
        relay_arguments = ("--origin", origin_url, *key, "--data-dir", str(tmp_path / "relay"), "--host", "127.0.0.1")
        async with process("relay", *relay_arguments, "--port", "0", log=tmp_path / "r.log") as relay:
            url = await ready_url(relay)
            arguments = ("--source", url, *key, "--out", str(tmp_path / "c"))
            status, out, err = await run_command("fetch", *arguments, "--version", "0")
            assert status == 0 and "way=full" in out, err
            await run.publish(origin_url, data, range(1, 3))
            status, out, err = await run_command("fetch", *arguments, "--version", "2")
            assert status == 0 and "way=delta" in out, (out, err)
            assert_same(Path(out.split("path=")[1].strip()), run.versions[2])
