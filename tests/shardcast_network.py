"""SHARDCAST in tests: signed versions, sources that a test can bend, servers in this process and as processes."""

from __future__ import annotations

import asyncio
import random
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from protocol.manifest import (
    Digest,
    Manifest,
    SignedEnvelope,
    envelope_to_json,
    manifest_digest,
    sign_manifest,
)
from protocol.rotation import chain_to_json
from protocol.signing import Identity
from shardcast.client import ShardcastClient
from shardcast.config import ClientLimits, ServerLimits
from shardcast.have import Have
from shardcast.layout import incoming_folder, incoming_packed
from shardcast.listen import listening
from shardcast.metrics import ShardcastMetrics
from shardcast.origin import Origin
from shardcast.peer_server import PeerService
from shardcast.publish import announce, describe, pack
from shardcast.quota import MonthlyQuota
from shardcast.relay import RelayCatalog
from shardcast.server import Handler, ShardcastApp
from shardcast.storage import VersionStore
from shardcast.uplink import Uplink
from tests.unit.shardcast.delta.versions import safetensors, words

TRAINER = Identity.from_seed(b"t" * 32)
STRANGER = Identity.from_seed(b"s" * 32)
KEYS = [TRAINER.key_id]
SHARD = 64 * 1024
SHARDS = 12
FAST = ClientLimits(
    parallel=3, connect_timeout_s=2.0, read_timeout_s=2.0, shard_wait_s=2.0, deadline_s=3.0, min_rate_grace_s=0.3
)
SOON = 20.0  # every wait of a test ends within this


@dataclass
class Version:
    """A signed version in a folder."""

    folder: Path
    manifest: Manifest
    envelope: SignedEnvelope
    torrent: bytes | None = None
    packed: Path | None = None

    @property
    def digest(self) -> Digest:
        return manifest_digest(self.envelope.payload)

    def shard_bytes(self, digest: str) -> bytes | None:
        shard = next((each for each in self.manifest.shards if each.digest == digest), None)
        if shard is None:
            return None
        data = (self.folder / self.manifest.files[shard.file].path).read_bytes()
        return data[shard.offset : shard.offset + shard.size]


def make_version(
    folder: Path,
    version: int = 0,
    seed: int = 0,
    signer: Identity = TRAINER,
    shards: int = SHARDS,
    *,
    packed: bool = False,
) -> Version:
    """Noise, or if it is to be had packed, weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"the": "same in every version"}')
    data = random.Random(f"{version}/{seed}").randbytes(SHARD * shards - 100)
    if packed:
        data = safetensors({"w": ("BF16", words(len(data) // 2 - 100, seed=version).tobytes())})
    (folder / "model.safetensors").write_bytes(data)
    described = describe(folder, run_id="run", policy_version=version, shard_bytes=SHARD)
    if packed:
        blob = folder.with_name(f"{folder.name}.packed")
        smaller = pack(folder, described.manifest, blob, shard_bytes=SHARD)
        assert smaller is not None
        described = smaller
    envelope = sign_manifest(described.manifest, signer)
    return Version(folder, described.manifest, envelope, described.torrent, described.packed)


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
    have: Have | None = None
    rotations: list[SignedEnvelope] | None = None
    older: Version | None = None  # whose shards are served too
    asked: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def serving(self, *routes: tuple[str, Handler]) -> AsyncIterator[str]:
        app = web.Application()
        for path, handler in routes:
            app.router.add_route("*", path, handler)
        app.router.add_get("/v1/head", self._head)
        app.router.add_get("/v1/manifests/{version}", self._manifest)
        app.router.add_get("/v1/shards/{digest}", self._shard)
        app.router.add_get("/v1/have/{digest}", self._have)
        app.router.add_get("/v1/keys", self._keys)
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

    async def _keys(self, request: web.Request) -> web.StreamResponse:
        if self.rotations is None:
            raise web.HTTPNotFound
        return web.Response(body=chain_to_json(self.rotations))

    async def _have(self, request: web.Request) -> web.StreamResponse:
        if self.have is None:
            raise web.HTTPNotFound
        return web.json_response(self.have.to_json())

    async def _shard(self, request: web.Request) -> web.StreamResponse:
        digest = request.match_info["digest"]
        self.asked.append(digest)
        self.ranges.append(request.headers.get("Range", ""))
        data = self.version.shard_bytes(digest) or (self.older.shard_bytes(digest) if self.older else None)
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
    origin = Origin(store, limits=ServerLimits(shutdown_s=0.1), keep_last=2, **options)
    async with listening(origin.app, "127.0.0.1", 0, ServerLimits(shutdown_s=0.1)) as url:
        yield url, origin
        origin.catalog.close()


@asynccontextmanager
async def relay_in_process(
    data_dir: Path,
    *upstream: str,
    peers: Sequence[str] = (),
    port: int = 0,
    limits: ClientLimits = FAST,
    keep_last: int = 2,
    help_peers: bool = False,
    quota: MonthlyQuota | None = None,
    uplink: Uplink | None = None,
    **options: Any,
) -> AsyncIterator[tuple[str, RelayCatalog]]:
    metrics = ShardcastMetrics()
    own_id = f"relay-{data_dir.name}"
    async with ShardcastClient(
        upstream, KEYS, data_dir, peers=peers, own_id=own_id, limits=limits, metrics=metrics
    ) as client:
        catalog = RelayCatalog(client.store, metrics, client, keep_last=keep_last, help_peers=help_peers, **options)
        serving = ShardcastApp(catalog, ServerLimits(), uplink, quota)
        app = serving.build()
        if help_peers:
            PeerService(serving).add_to(app)
        async with listening(app, "127.0.0.1", port, ServerLimits(shutdown_s=0.1)) as url:
            following = asyncio.create_task(catalog.follow())
            try:
                yield url, catalog
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                await catalog.stop()


def reserve_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


async def publish(url: str, origin: Origin, version: Version) -> Version:
    """Give a version to an origin in this process; its files lie there afterwards."""
    number = version.manifest.policy_version
    root = origin.catalog.store.root
    version.folder.rename(incoming_folder(root, number))
    if version.packed is not None:
        version.packed.replace(incoming_packed(root, number))
    await announce(url, version.envelope)
    return replace(version, folder=root / "versions" / f"{number}-{version.digest.short}")


async def until(done: Callable[[], bool]) -> None:
    """Wait for what other threads and processes bring about; the test's deadline bounds it."""
    changed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def look() -> None:
        if done():
            changed.set()
        else:
            loop.call_later(0.02, look)

    look()
    await changed.wait()


async def whole(catalog: RelayCatalog, version: int) -> None:
    """Wait until a relay has a version complete."""
    await catalog.changed.wait_until(lambda: catalog.store.get(version) is not None, SOON)
    assert catalog.store.get(version) is not None


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
    try:
        async with asyncio.timeout(SOON):
            out, err = await started.communicate()
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()
    assert started.returncode is not None
    return started.returncode, out.decode(), err.decode()
