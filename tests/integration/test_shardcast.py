"""SHARDCAST over real sockets and real processes, against honest and hostile sources."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from protocol.errors import SourceFault, UserError
from protocol.manifest import (
    Digest,
    Manifest,
    SignedEnvelope,
    envelope_to_json,
    manifest_digest,
    sign_manifest,
)
from protocol.signing import MANIFEST, Identity
from shardcast.bandwidth import Throttle
from shardcast.catalog import Catalog
from shardcast.client import Progress, ShardcastClient
from shardcast.config import ClientLimits, ServerLimits
from shardcast.layout import incoming_folder
from shardcast.metrics import ShardcastMetrics
from shardcast.names import VersionConflict
from shardcast.origin import Origin
from shardcast.publish import announce, build_manifest, next_version, publish_version
from shardcast.relay import RelayCatalog
from shardcast.server import ShardcastApp, listening
from shardcast.storage import VersionStore

TRAINER = Identity.from_seed(b"t" * 32)
STRANGER = Identity.from_seed(b"s" * 32)
KEYS = [TRAINER.key_id]
SHARD = 64 * 1024
SHARDS = 12
FAST = ClientLimits(
    parallel=3, connect_timeout_s=2.0, read_timeout_s=2.0, shard_wait_s=2.0, deadline_s=3.0, min_rate_grace_s=0.3
)
SOON = 20.0  # every wait of a test ends within this


# A version


@dataclass
class Version:
    """A signed version in a folder."""

    folder: Path
    manifest: Manifest
    envelope: SignedEnvelope

    @property
    def digest(self) -> Digest:
        return manifest_digest(self.envelope.payload)

    def shard_bytes(self, digest: str) -> bytes | None:
        shard = next((each for each in self.manifest.shards if each.digest == digest), None)
        if shard is None:
            return None
        data = (self.folder / self.manifest.files[shard.file].path).read_bytes()
        return data[shard.offset : shard.offset + shard.size]


def make_version(folder: Path, version: int = 0, seed: int = 0, signer: Identity = TRAINER) -> Version:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(random.Random(f"{version}/{seed}").randbytes(SHARD * SHARDS - 100))
    (folder / "config.json").write_text('{"the": "same in every version"}')
    manifest = build_manifest(folder, run_id="run", policy_version=version, shard_bytes=SHARD)
    return Version(folder, manifest, sign_manifest(manifest, signer))


def names_below(path: Path) -> set[str]:
    return {each.name for each in path.rglob("*")}


def assert_same(path: Path, version: Version) -> None:
    names = {file.path for file in version.manifest.files}
    assert {each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file()} == names
    for name in names:
        assert (path / name).read_bytes() == (version.folder / name).read_bytes()


# Sources in this process


@dataclass
class FakeSource:
    """Serves one version; a test changes how. Counts what was asked."""

    version: Version
    shard: Callable[[web.Request, bytes], Awaitable[web.StreamResponse]] | None = None
    manifest: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
    asked: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/v1/head", self._head)
        app.router.add_get("/v1/manifests/{version}", self._manifest)
        app.router.add_get("/v1/shards/{digest}", self._shard)
        async with listening(app, "127.0.0.1", 0, ServerLimits(shutdown_s=0.1)) as url:
            yield url

    async def _head(self, request: web.Request) -> web.StreamResponse:
        number = self.version.manifest.policy_version
        return web.json_response({"version": number, "manifest_digest": self.version.digest})

    async def _manifest(self, request: web.Request) -> web.StreamResponse:
        if self.manifest:
            return await self.manifest(request)
        if request.match_info["version"] != str(self.version.manifest.policy_version):
            raise web.HTTPNotFound
        return web.Response(body=envelope_to_json(self.version.envelope))

    async def _shard(self, request: web.Request) -> web.StreamResponse:
        digest = request.match_info["digest"]
        self.asked.append(digest)
        self.ranges.append(request.headers.get("Range", ""))
        data = self.version.shard_bytes(digest)
        if data is None:
            raise web.HTTPNotFound
        if self.shard:
            return await self.shard(request, data)
        return serve_range(request, data)


def serve_range(request: web.Request, data: bytes) -> web.Response:
    start = request.http_range.start
    if start is None:
        return web.Response(body=data)
    headers = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
    return web.Response(status=206, body=data[start:], headers=headers)


@asynccontextmanager
async def origin_in_process(data_dir: Path, **options: Any) -> AsyncIterator[tuple[str, Origin]]:
    store = VersionStore(data_dir, KEYS)
    origin = Origin(store, KEYS, limits=ServerLimits(shutdown_s=0.1), keep_last=2, **options)
    async with listening(origin.app, "127.0.0.1", 0, ServerLimits(shutdown_s=0.1)) as url:
        yield url, origin
        origin.catalog.close()


@asynccontextmanager
async def relay_in_process(
    data_dir: Path, *upstream: str, limits: ClientLimits = FAST
) -> AsyncIterator[tuple[str, RelayCatalog]]:
    metrics = ShardcastMetrics()
    async with ShardcastClient(upstream, KEYS, data_dir, limits=limits, metrics=metrics) as client:
        catalog = RelayCatalog(client.store, metrics, client, keep_last=2)
        app = ShardcastApp(catalog, ServerLimits()).build()
        async with listening(app, "127.0.0.1", 0, ServerLimits(shutdown_s=0.1)) as url:
            following = asyncio.create_task(catalog.follow())
            try:
                yield url, catalog
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                await catalog.stop()


def client(sources: list[str], cache: Path, **options: Any) -> ShardcastClient:
    options.setdefault("limits", FAST)
    return ShardcastClient(sources, KEYS, cache, rng=random.Random(1), **options)


# Sources and clients as processes


@asynccontextmanager
async def process(*arguments: str, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    with log.open("ab") as stderr:
        started = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "shardcast.main", *arguments, stdout=asyncio.subprocess.PIPE, stderr=stderr
        )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


async def ready_url(started: asyncio.subprocess.Process) -> str:
    assert started.stdout is not None
    async with asyncio.timeout(SOON):
        line = (await started.stdout.readline()).decode()
    assert line.startswith("ready url=http://127.0.0.1:"), line
    return line.strip().removeprefix("ready url=")


def folder_of(out: str) -> Path:
    return Path(out.split("path=")[1].strip())


async def run_command(*arguments: str) -> tuple[int, str, str]:
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "shardcast.main",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(SOON):
        out, err = await started.communicate()
    assert started.returncode is not None
    return started.returncode, out.decode(), err.decode()


# The whole


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
            assert 'rollswarm_shardcast_bytes_total{direction="out",source="clients"}' in metrics
            assert "shardcast relay" in page
            relay.send_signal(signal.SIGTERM)
            async with asyncio.timeout(SOON):
                assert await relay.wait() == 0
    assert "Traceback" not in log.read_text()


async def test_a_relay_serves_a_shard_before_it_has_the_next(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v0")
    release = asyncio.Event()
    allowed = {shard.digest for shard in version.manifest.shards[:2]}

    async def gate(request: web.Request, data: bytes) -> web.StreamResponse:
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
            if progress.done >= sum(shard.size for shard in version.manifest.shards[:2]):
                got_two.set()

        await downstream.head(wait_s=SOON)
        fetching = asyncio.create_task(downstream.fetch(0, on_progress=on_progress))
        await got_two.wait()
        assert catalog.store.versions == [] and not release.is_set()
        release.set()
        assert_same(await fetching, version)
        assert seen == sorted(seen)
    assert Counter(upstream.asked).most_common(1)[0][1] == 1  # the relay asked upstream once for each shard


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
            with pytest.raises(SourceFault, match="no source has version 3"):
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


# Hostile and broken sources


async def flip_a_byte(request: web.Request, data: bytes) -> web.StreamResponse:
    return web.Response(body=bytes([data[0] ^ 1]) + data[1:])


async def redirect(request: web.Request, data: bytes) -> web.StreamResponse:
    raise web.HTTPFound("http://127.0.0.1:1/elsewhere")


async def too_short(request: web.Request, data: bytes) -> web.StreamResponse:
    return web.Response(body=data[:-1])


async def too_long(request: web.Request, data: bytes) -> web.StreamResponse:
    return web.Response(body=data + b"x")


async def encoded(request: web.Request, data: bytes) -> web.StreamResponse:
    return web.Response(body=data, headers={"Content-Encoding": "gzip"})


async def endless(request: web.Request, data: bytes) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(data)


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        (flip_a_byte, "wrong bytes"),
        (redirect, "redirects"),
        (too_short, "announces"),
        (too_long, "announces"),
        (encoded, "encoded"),
        (endless, "announces None"),
    ],
)
async def test_a_source_that_misbehaves_is_dropped_and_named(
    tmp_path: Path, behaviour: Callable[..., Awaitable[web.StreamResponse]], said: str
) -> None:
    version = make_version(tmp_path / "v0")
    evil, honest = FakeSource(version, shard=behaviour), FakeSource(version)
    async with asyncio.timeout(SOON), evil.serving() as bad, honest.serving() as good:
        async with client([bad, good], tmp_path / "cache") as both:
            assert_same(await both.fetch(0), version)
            stats = both.source_stats[bad]
            assert stats.bans >= 1 and said in stats.last_fault
            assert both.source_stats[good].bans == 0
        assert len(evil.asked) <= FAST.parallel
        async with client([bad], tmp_path / "alone") as alone:
            with pytest.raises(SourceFault, match=rf"dropped: {bad}.*{said}"):
                await alone.fetch(0)
            assert alone.store.versions == [] and not list((tmp_path / "alone" / "versions").iterdir())


async def test_a_source_that_trickles_or_falls_silent_is_left(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v0")
    ended = asyncio.Event()

    async def trickle(request: web.Request, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = len(data)
        await response.prepare(request)
        for at in range(len(data)):
            await response.write(data[at : at + 1])
            try:
                async with asyncio.timeout(0.05):
                    await ended.wait()
            except TimeoutError:
                continue
        return response

    async with asyncio.timeout(SOON), FakeSource(version, shard=trickle).serving() as slow:
        async with FakeSource(version).serving() as good, client([slow, good], tmp_path / "cache") as both:
            assert_same(await both.fetch(0), version)
            assert "bytes/s" in both.source_stats[slow].last_fault
        ended.set()


async def test_a_cut_connection_is_resumed_where_it_broke(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v0")
    cut: set[str] = set()

    async def cut_once(request: web.Request, data: bytes) -> web.StreamResponse:
        if request.match_info["digest"] in cut or len(data) < SHARD // 2:
            return serve_range(request, data)
        cut.add(request.match_info["digest"])
        response = web.StreamResponse()
        response.content_length = len(data)
        await response.prepare(request)
        await response.write(data[: SHARD // 2])
        assert request.transport is not None
        request.transport.close()
        return response

    source = FakeSource(version, shard=cut_once)
    async with asyncio.timeout(SOON), source.serving() as url, client([url], tmp_path / "cache") as resuming:
        assert_same(await resuming.fetch(0), version)
    assert source.ranges.count(f"bytes={SHARD // 2}-") == SHARDS


async def test_bytes_pieced_together_from_two_sources_ban_neither(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v0")

    async def lie_and_cut(request: web.Request, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = len(data)
        await response.prepare(request)
        await response.write(bytes(len(data) // 2))
        assert request.transport is not None
        request.transport.close()
        return response

    evil, honest = FakeSource(version, shard=lie_and_cut), FakeSource(version)
    async with (
        asyncio.timeout(SOON),
        evil.serving() as bad,
        honest.serving() as good,
        client([bad, good], tmp_path / "cache") as both,
    ):
        assert_same(await both.fetch(0), version)
        assert both.source_stats[good].bans == 0
        assert both.source_stats[bad].success < 1.0


async def test_forged_manifests_are_refused_whatever_they_say(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v0")
    forged = make_version(tmp_path / "forged", signer=STRANGER)
    claimed = SignedEnvelope(forged.envelope.payload, TRAINER.key_id, forged.envelope.signature)
    body = json.loads(version.envelope.payload)
    body["files"][1]["path"] = "../../../escaped"
    traversal = TRAINER.sign(MANIFEST, json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    other_number = make_version(tmp_path / "v9", 9).envelope
    for envelope, said in (
        (forged.envelope, "not a key this run pins"),
        (claimed, "does not match"),
        (traversal, "'..'"),
        (other_number, "version 9 for 0"),
    ):

        async def lie(request: web.Request, envelope: SignedEnvelope = envelope) -> web.StreamResponse:
            return web.Response(body=envelope_to_json(envelope))

        async with asyncio.timeout(SOON), FakeSource(version, manifest=lie).serving() as bad:
            async with client([bad], tmp_path / "cache") as alone:
                with pytest.raises(SourceFault, match=said):
                    await alone.fetch(0)
                with pytest.raises(SourceFault):
                    await alone.head()
            async with FakeSource(version).serving() as good, client([bad, good], tmp_path / "both") as both:
                head = await both.head()
                assert head is not None and head.manifest_digest == version.digest
                assert both.source_stats[bad].bans == 1
    assert "escaped" not in names_below(tmp_path)


async def test_an_endless_manifest_is_cut_off(tmp_path: Path) -> None:
    async def flood(request: web.Request) -> web.StreamResponse:
        return await endless(request, b" " * 65536)

    limits = ClientLimits(max_envelope_bytes=2**20)
    version = make_version(tmp_path / "v0")
    async with (
        asyncio.timeout(SOON),
        FakeSource(version, manifest=flood).serving() as bad,
        client([bad], tmp_path / "cache", limits=limits) as alone,
    ):
        with pytest.raises(SourceFault, match="more than 1048576 bytes"):
            await alone.fetch(0)


async def test_a_version_larger_than_the_limit_is_not_begun(tmp_path: Path) -> None:
    source = FakeSource(make_version(tmp_path / "v0"))
    limits = ClientLimits(max_total_bytes=1000, deadline_s=0.1)
    async with (
        asyncio.timeout(SOON),
        source.serving() as url,
        client([url], tmp_path / "cache", limits=limits) as small,
    ):
        with pytest.raises(SourceFault, match="at most 1000"):
            await small.fetch(0)
    assert source.asked == []


async def test_an_expected_digest_decides_and_a_number_is_never_rebound(tmp_path: Path) -> None:
    right, wrong = make_version(tmp_path / "right"), make_version(tmp_path / "wrong", seed=1)
    async with asyncio.timeout(SOON), FakeSource(wrong).serving() as bad, FakeSource(right).serving() as good:
        async with client([bad, good], tmp_path / "cache") as picky:
            assert_same(await picky.fetch(0, right.digest), right)
            assert picky.prune(keep=set()) == [0]
        async with client([bad], tmp_path / "cache") as later:
            with pytest.raises(SourceFault, match="expected"):
                await later.fetch(0)
            with pytest.raises(VersionConflict, match="for ever"):
                await later.fetch(0, wrong.digest)
            assert later.store.versions == []


async def test_when_every_source_is_down_the_fault_names_each(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        down = f"http://127.0.0.1:{unused.getsockname()[1]}"
        limits = ClientLimits(deadline_s=0.3, connect_timeout_s=0.5)
        async with asyncio.timeout(SOON), client([down, "http://127.0.0.1:9"], tmp_path, limits=limits) as lonely:
            with pytest.raises(SourceFault, match=rf"{down}.*; http://127.0.0.1:9"):
                await lonely.fetch(0)
            with pytest.raises(SourceFault, match=down):
                await lonely.head()


# Resume and concurrency


async def test_after_kill_9_verified_shards_are_not_fetched_again(tmp_path: Path) -> None:
    version = make_version(tmp_path / "v0")
    verified = {shard.digest for shard in version.manifest.shards[:4]}
    stuck, never = asyncio.Event(), asyncio.Event()
    held: set[str] = set()

    async def hold(request: web.Request, data: bytes) -> web.StreamResponse:
        if request.match_info["digest"] in verified:
            return serve_range(request, data)
        held.add(request.match_info["digest"])
        if len(held) == ClientLimits().parallel:  # each task holds one more, so the others are committed
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


# The origin


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


async def test_required_versions_are_kept_and_all_are_while_the_coordinator_is_away(tmp_path: Path) -> None:
    async def required(request: web.Request) -> web.Response:
        return web.json_response({"versions": [1]})

    app = web.Application()
    app.router.add_get("/api/v1/versions/required", required)
    data = tmp_path / "data"
    async with asyncio.timeout(SOON):
        async with (
            listening(app, "127.0.0.1", 0, ServerLimits()) as coordinator,
            origin_in_process(data, coordinator=coordinator) as (url, origin),
        ):
            for number in range(6):
                make_version(tmp_path / "made", number).folder.rename(incoming_folder(data, number))
                folder = incoming_folder(data, number)
                manifest = build_manifest(folder, run_id="run", policy_version=number, shard_bytes=SHARD)
                await announce(url, sign_manifest(manifest, TRAINER))
            assert await origin.collect() == [2, 3]
        async with origin_in_process(data, coordinator=coordinator) as (_, origin):
            assert await origin.collect() == []
            assert origin.catalog.store.versions == [0, 1, 4, 5]


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

    class Recorder(Throttle):
        async def take(self, count: int) -> None:
            taken.append(count)

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


# What people type wrong


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
