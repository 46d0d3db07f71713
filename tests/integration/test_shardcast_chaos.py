"""Fifty versions while relays are killed, corrupted, throttled and lied beside: nobody ever loads a wrong byte.

Three relay processes, siblings of one another, each behind a proxy that a seeded script makes slow, cuts, or lets pass;
a liar that serves wrong bytes; three clients that follow the head with the relays, the liar and the origin as sources.
A watcher looks into all folders all the time: whatever is visible in `versions/` is whole.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from shardcast.client import ShardcastClient
from shardcast.config import ClientLimits
from shardcast.layout import version_of
from shardcast.origin import Origin
from shardcast.pulse import Pulse
from tests.shardcast_network import (
    KEYS,
    SOON,
    TRAINER,
    FakeSource,
    Version,
    make_version,
    origin_in_process,
    process,
    publish,
    ready_url,
    reserve_port,
)

SEED = 20
VERSIONS = 50
RELAYS = 3
CLIENTS = 3
LAG = 4  # versions that the slowest client may be behind before the next is published
LIMITS = ClientLimits(
    parallel=6,
    parallel_per_source=3,
    connect_timeout_s=1.0,
    read_timeout_s=1.0,
    shard_wait_s=0.5,
    have_wait_s=2.0,
    hint_patience_s=0.5,
    min_bytes_per_s=64 * 1024.0,
    min_rate_grace_s=0.5,
    ban_s=0.5,
    deadline_s=60.0,
)


@dataclass
class Proxy:
    """Stands before a relay. `mode`: ok, slow (a few bytes at a time), cut (after some bytes), or closed."""

    target: int
    mode: str = "ok"
    changed: Pulse = field(default_factory=Pulse)
    moved: int = 0

    def turn(self, mode: str) -> None:
        self.mode = mode
        self.changed.beat()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self.mode == "closed":
                return
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target)
            try:
                pumps = [asyncio.create_task(self._pump(*pair)) for pair in ((reader, up_writer), (up_reader, writer))]
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
            finally:
                up_writer.close()
        except OSError:
            pass
        finally:
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2048 if self.mode == "slow" else 65536):
            self.moved += len(data)
            if self.mode == "cut" and self.moved % 7 == 0:
                return
            if self.mode == "slow":
                await self.changed.wait_until(lambda: self.mode != "slow", 0.05)
            writer.write(data)
            await writer.drain()


@dataclass
class World:
    """All parties, and what every version must be."""

    folder: Path
    truth: dict[int, Version] = field(default_factory=dict)
    reached: dict[str, int] = field(default_factory=dict)
    moved_on: Pulse = field(default_factory=Pulse)
    seen: int = 0
    wrong: list[str] = field(default_factory=list)

    def check_file(self, path: Path, version: Version, name: str, content: bool) -> None:
        """Note whatever differs from the truth."""
        try:
            found = path.read_bytes() if content else path.stat().st_size
        except FileNotFoundError:  # collected meanwhile
            return
        expected: bytes | int = (version.folder / name).read_bytes()
        if not content:
            expected = len(expected)  # type: ignore[arg-type]
        if found != expected and path.exists():
            self.wrong.append(str(path))
        self.seen += 1

    def look(self, root: Path, content: bool) -> None:
        """Compare everything that is visible in a root's `versions/`."""
        for folder in [*(root / "versions").glob("*")]:
            number = version_of(folder.name)
            version = None if number is None else self.truth.get(number)
            if version is None:
                self.wrong.append(f"{folder} has no business here")
                continue
            for file in version.manifest.files:
                self.check_file(folder / file.path, version, file.path, content)


async def follow(world: World, name: str, sources: list[str]) -> None:
    """What a worker does: fetch every newer head, look at each byte, forget the one before."""
    root = world.folder / name
    async with ShardcastClient(sources, KEYS, root, limits=LIMITS, rng=random.Random(name)) as client:
        after: int | None = None
        while after != VERSIONS:
            head = await client.head(after, SOON)
            if head is None:
                continue
            path = await client.fetch(head.version, head.manifest_digest)
            for file in world.truth[head.version].manifest.files:
                world.check_file(path / file.path, world.truth[head.version], file.path, content=True)
            await asyncio.to_thread(client.prune, {head.version})
            after = world.reached[name] = head.version
            world.moved_on.beat()


def flip_bytes(root: Path, rng: random.Random) -> None:
    """A bad disk: some bytes of every complete version of a relay."""
    for path in (root / "versions").glob("*/model.safetensors"):
        descriptor = os.open(path, os.O_RDWR)
        try:
            size = os.fstat(descriptor).st_size
            for _ in range(8):
                at = rng.randrange(size)
                byte = os.pread(descriptor, 1, at)
                os.pwrite(descriptor, bytes([byte[0] ^ 0xFF]), at)
        finally:
            os.close(descriptor)


class Relays:
    """The relay processes: each can be killed and begun again on its folder and port."""

    def __init__(self, world: World, origin: str, urls: list[str], ports: list[int], stack: AsyncExitStack) -> None:
        self._world = world
        self._origin = origin
        self._urls = urls
        self._ports = ports
        self._stack = stack
        self.running: dict[int, asyncio.subprocess.Process] = {}
        self.killed = 0

    def root(self, number: int) -> Path:
        return self._world.folder / f"relay{number}"

    async def start(self, number: int) -> None:
        peers = [part for other, url in enumerate(self._urls) if other != number for part in ("--peer", url)]
        arguments = ("--origin", self._origin, "--trainer-key", TRAINER.key_id, "--host", "127.0.0.1", *peers)
        started = process(
            *("relay", *arguments, "--data-dir", str(self.root(number)), "--port", str(self._ports[number])),
            log=self._world.folder / "log",
        )
        self.running[number] = await self._stack.enter_async_context(started)
        await ready_url(self.running[number])

    async def kill(self, number: int) -> None:
        self.running[number].kill()
        await self.running.pop(number).wait()
        self.killed += 1


async def misfortune(rng: random.Random, relays: Relays, proxies: list[Proxy], liar: FakeSource) -> None:
    """What happens between two versions."""
    number = rng.randrange(RELAYS)
    match rng.choice(["kill", "start", "start", "flip", "slow", "cut", "closed", "ok", "ok", "lie", "honest"]):
        case "kill" if number in relays.running:
            await relays.kill(number)
        case "start":
            for other in range(RELAYS):
                if other not in relays.running:
                    await relays.start(other)
        case "flip":
            await asyncio.to_thread(flip_bytes, relays.root(number), rng)
        case "slow" | "cut" | "closed" | "ok" as mode:
            proxies[number].turn(mode)
        case "lie":
            liar.shard = flip_first
        case "honest":
            liar.shard = None


async def flip_first(request: web.Request, data: bytes) -> web.StreamResponse:
    return web.Response(body=bytes([data[0] ^ 1]) + data[1:])


async def publish_all(
    world: World, url: str, origin: Origin, relays: Relays, proxies: list[Proxy], liar: FakeSource
) -> None:
    rng = random.Random(SEED)
    for number in range(1, VERSIONS + 1):
        await misfortune(rng, relays, proxies, liar)
        made = make_version(world.folder / f"made{number}", number, shards=24, packed=number % 2 == 0)
        world.truth[number] = Version(made.folder.with_name(f"truth{number}"), made.manifest, made.envelope)
        await asyncio.to_thread(copy_tree, made.folder, world.truth[number].folder)
        liar.version = world.truth[number]
        await publish(url, origin, made)
        await world.moved_on.wait_until(
            lambda: min(world.reached.values()) >= number - LAG,  # noqa: B023 - waited for at once
            SOON,
        )


def copy_tree(source: Path, target: Path) -> None:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())


async def test_fifty_versions_of_chaos(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.reached = {f"client{number}": 0 for number in range(CLIENTS)}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            for name in list(world.reached):
                world.look(tmp_path / name, content=True)
            for number in range(RELAYS):  # their bytes are flipped on purpose: sizes
                world.look(tmp_path / f"relay{number}", content=False)

    watching = asyncio.create_task(asyncio.to_thread(watch))
    ports = [reserve_port() for _ in range(RELAYS)]
    proxies = [Proxy(port) for port in ports]
    liar = FakeSource(make_version(tmp_path / "nothing", 0))
    try:
        async with asyncio.timeout(300), AsyncExitStack() as stack:
            url, origin = await stack.enter_async_context(origin_in_process(tmp_path / "origin"))
            urls = [await stack.enter_async_context(proxy.serving()) for proxy in proxies]
            relays = Relays(world, url, urls, ports, stack)
            await asyncio.gather(*(relays.start(number) for number in range(RELAYS)))
            world.truth[0] = liar.version
            liar_url = await stack.enter_async_context(liar.serving())
            async with asyncio.TaskGroup() as group:
                for name in world.reached:
                    group.create_task(follow(world, name, [*urls, liar_url, url]))
                group.create_task(publish_all(world, url, origin, relays, proxies, liar))
    finally:
        over.set()
        await watching
    assert world.wrong == []
    assert set(world.reached.values()) == {VERSIONS}
    assert world.seen > VERSIONS and relays.killed > 0
    assert "Traceback" not in (tmp_path / "log").read_text()
