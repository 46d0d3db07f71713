"""Resuming, and processes that share a cache."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from aiohttp import web

from shardcast.config import ClientLimits
from shardcast.storage import VersionStore
from tests.shardcast_network import (
    KEYS,
    SOON,
    TRAINER,
    FakeSource,
    assert_same,
    client,
    folder_of,
    make_version,
    process,
    run_command,
    serve_range,
)


async def test_after_kill_9_verified_shards_are_not_fetched_again(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v0")
    verified: set[str] = set()
    stuck, never = asyncio.Event(), asyncio.Event()
    held: set[str] = set()

    async def hold(request: web.Request, data: bytes) -> web.StreamResponse:
        if len(verified) < 4:
            verified.add(request.match_info["digest"])
            return serve_range(request, data)
        held.add(request.match_info["digest"])
        if len(held) == ClientLimits().parallel_per_source:  # all it asks for at once, so the others are committed
            stuck.set()
        await never.wait()
        return web.Response()

    arguments = ("--trainer-key", TRAINER.key_id, "--out", str(tmp_path / "cache"), "--version", "0")
    async with asyncio.timeout(SOON), FakeSource(version, shard=hold).serving() as url:
        async with process("fetch", "--source", url, *arguments, log=tmp_path / "log") as fetching:
            await stuck.wait()
            fetching.kill()
            await fetching.wait()
        never.set()
    assert VersionStore(tmp_path / "cache", KEYS).versions == []
    second = FakeSource(version)
    async with asyncio.timeout(SOON), second.serving() as url, client([url], tmp_path / "cache") as resuming:
        assert_same(await resuming.fetch(0), version)
    assert set(second.asked) == {shard.digest for shard in version.manifest.shards} - verified


async def test_two_processes_may_fetch_one_version_into_one_cache(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v0")
    source = FakeSource(version)
    async with asyncio.timeout(SOON), source.serving() as url:
        arguments = ("--source", url, "--trainer-key", TRAINER.key_id, "--out", str(tmp_path / "cache"))
        results = await asyncio.gather(*(run_command("fetch", *arguments) for _ in range(2)))
    assert [status for status, _, _ in results] == [0, 0], results
    for _, out, _ in results:
        assert_same(folder_of(out), version)
    assert Counter(source.asked).most_common(1)[0][1] == 1


async def test_files_that_did_not_change_are_not_sent_again(tmp_path: Path) -> None:
    first, second = make_version(tmp_path / "v0", 0), make_version(tmp_path / "v1", 1)
    later = FakeSource(second)
    async with asyncio.timeout(SOON), FakeSource(first).serving() as old, later.serving() as new:
        async with client([old], tmp_path / "cache") as before:
            await before.fetch(0)
        async with client([new], tmp_path / "cache") as after:
            assert_same(await after.fetch(1), second)
            assert after.prune(keep={1}) == [0]
            assert after.store.versions == [1]
    unchanged = {shard.digest for shard in second.manifest.shards if shard.file == 0}
    assert unchanged and not unchanged & set(later.asked)
