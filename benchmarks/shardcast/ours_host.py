"""What a host of this project's variants runs besides `shardcast origin` and `relay`: a worker, or the publisher.

Times on standard output are of the machine's monotonic clock, which all namespaces share.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from pathlib import Path

import aiohttp

from protocol.manifest import sign_manifest
from protocol.signing import Identity
from shardcast.client import ShardcastClient
from shardcast.publish import Described, announce, describe, make_delta, pack, stage
from shardcast.swarm import Swarm, SwarmConfig

RUN = "benchmark"
_READY_WAIT_S = 60.0
_POLL_S = 0.2


async def work(arguments: argparse.Namespace) -> None:
    """Wait for each next version, fetch it, and say when it was whole."""
    swarm = Swarm(SwarmConfig()) if arguments.peers else None
    client = ShardcastClient(arguments.source, [arguments.trainer_key], arguments.data, run_id=RUN, swarm=swarm)
    async with client:
        await client.head()
        print("ready", flush=True)
        after: int | None = None
        while True:
            head = await client.head(after, _READY_WAIT_S)
            if head is None:
                continue
            await client.fetch(head.version, head.manifest_digest)
            print(f"done {time.monotonic()}", flush=True)
            after = head.version


async def publish(arguments: argparse.Namespace) -> None:
    """Publish a folder; say when it was announced, how long it took to prepare, and how many bytes a worker needs."""
    begin = time.monotonic()
    identity = Identity.from_seed(bytes.fromhex(arguments.seed))
    described = _describe(arguments.folder, arguments.version, arguments.shard_bytes)
    threads = os.cpu_count() or 1
    if arguments.packed:
        blob, size = arguments.data / "scratch.packed", arguments.shard_bytes
        found = pack(arguments.folder, described.manifest, blob, shard_bytes=size, threads=threads)
        described = found or described
    manifest, delta = described.manifest, None
    if arguments.base is not None:
        base = _describe(arguments.base, arguments.version - 1, arguments.shard_bytes).manifest
        begin = time.monotonic()  # a trainer knows the base's manifest
        delta = arguments.data / "scratch.delta"
        made = make_delta(arguments.base, base, arguments.folder, manifest, delta, threads=threads)
        if made is None:
            raise SystemExit("the two versions differ too much for a delta")
        manifest = made
    envelope = sign_manifest(manifest, identity)
    await stage(
        arguments.folder,
        arguments.data,
        arguments.version,
        move=False,
        torrent=described.torrent,
        delta=delta,
        packed=described.packed,
    )
    announced = time.monotonic()
    await announce(arguments.origin, envelope)
    blob = manifest.delta or manifest.packed
    size = manifest.total_bytes if blob is None else blob.size
    print(f"announced {announced} {announced - begin} {size}", flush=True)


async def settle(arguments: argparse.Namespace) -> None:
    """Wait until the relays have a version whole."""
    async with aiohttp.ClientSession() as session:
        for url in arguments.relay:
            await _settled(session, url, arguments.version)
    print("settled", flush=True)


async def _settled(session: aiohttp.ClientSession, url: str, version: int) -> None:
    while True:
        async with session.get(f"{url}/healthz") as response:
            if (await response.json())["complete"] == version:
                return
        await asyncio.sleep(_POLL_S)


def _describe(folder: Path, version: int, shard_bytes: int) -> Described:
    return describe(folder, run_id=RUN, policy_version=version, shard_bytes=shard_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    roles = parser.add_subparsers(required=True)
    worker = roles.add_parser("worker")
    worker.add_argument("--source", action="append")
    worker.add_argument("--trainer-key")
    worker.add_argument("--data", type=Path)
    worker.add_argument("--peers", action="store_true")
    worker.set_defaults(run=work)
    publisher = roles.add_parser("publish")
    publisher.add_argument("--origin")
    publisher.add_argument("--seed")
    publisher.add_argument("--folder", type=Path)
    publisher.add_argument("--data", type=Path)
    publisher.add_argument("--version", type=int)
    publisher.add_argument("--shard-bytes", type=int)
    publisher.add_argument("--base", type=Path)
    publisher.add_argument("--packed", action="store_true")
    publisher.set_defaults(run=publish)
    settler = roles.add_parser("settle")
    settler.add_argument("--relay", action="append")
    settler.add_argument("--version", type=int)
    settler.set_defaults(run=settle)
    arguments = parser.parse_args()
    asyncio.run(arguments.run(arguments))


if __name__ == "__main__":
    main()
