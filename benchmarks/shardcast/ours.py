"""One publication by this project's origin, relays and workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shardcast.netns import Network
from benchmarks.shardcast.processes import Process, all_say, running
from benchmarks.shardcast.report import Sample
from protocol.signing import Identity

START_S = 120.0
_ORIGIN_PORT, _RELAY_PORT = "8600", "8601"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is published and how long it may take."""

    folder: Path  # the version's files
    shard_bytes: int
    scratch: Path  # emptied by the caller after each publication
    limit_s: float


async def publish_once(net: Network, plan: Plan, *, peers: bool = False) -> Sample:
    """Start everything, publish one version, and stop everything. `peers`: workers swap pieces."""
    seed = os.urandom(32)
    key = ("--trainer-key", Identity.from_seed(seed).key_id)
    async with AsyncExitStack() as stack:

        async def start(host_index: int, *command: str) -> Process:
            host = (net.origin, *net.relays, *net.workers)[host_index]
            process = running(host, sys.executable, "-m", *command, log_folder=plan.scratch)
            return await stack.enter_async_context(process)

        origin_url = f"http://{net.origin.address}:{_ORIGIN_PORT}"
        origin_data = plan.scratch / "origin"
        listen = ("--host", net.origin.address, "--port", _ORIGIN_PORT)
        origin = await start(0, "shardcast.main", "origin", "--data-dir", str(origin_data), *key, *listen)
        await origin.wait_for("ready", START_S)
        relays = [
            await start(
                number,
                *("shardcast.main", "relay", "--origin", origin_url, "--data-dir", str(plan.scratch / host.role), *key),
                *("--host", host.address, "--port", _RELAY_PORT),
                *_options("--peer", [f"http://{each.address}:{_RELAY_PORT}" for each in net.relays if each != host]),
            )
            for number, host in enumerate(net.relays, start=1)
        ]
        await all_say(relays, "ready", START_S)
        sources = _options("--source", [f"http://{host.address}:{_RELAY_PORT}" for host in net.relays])
        workers = [
            await start(
                number,
                *("benchmarks.shardcast.ours_host", "worker", *sources, *key),
                *("--data", str(plan.scratch / host.role), *(["--peers"] if peers else [])),
            )
            for number, host in enumerate(net.workers, start=1 + len(net.relays))
        ]
        await all_say(workers, "ready", START_S)
        return await _measure(net, plan, seed, origin_url, origin_data, origin, relays, workers)


def _options(name: str, values: Sequence[str]) -> list[str]:
    return [part for value in values for part in (name, value)]


async def _measure(
    net: Network,
    plan: Plan,
    seed: bytes,
    origin_url: str,
    origin_data: Path,
    origin: Process,
    relays: Sequence[Process],
    workers: Sequence[Process],
) -> Sample:
    senders = (net.origin, *net.relays)
    before = [host.sent_bytes() for host in senders]
    cpu_before = [process.cpu_seconds() for process in (origin, *relays, *workers)]
    publisher = running(
        net.origin,
        *(sys.executable, "-m", "benchmarks.shardcast.ours_host", "publish", "--origin", origin_url),
        *("--seed", seed.hex(), "--folder", str(plan.folder), "--data", str(origin_data), "--version", "0"),
        *("--shard-bytes", str(plan.shard_bytes)),
        log_folder=plan.scratch,
    )
    async with publisher as publishing:
        announced, prepared = map(float, (await publishing.wait_for("announced", START_S)).split())
        done = [float(text) for text in await all_say(workers, "done", plan.limit_s)]
    sent = [host.sent_bytes() - already for host, already in zip(senders, before, strict=True)]
    used = [
        process.cpu_seconds() - already
        for process, already in zip((origin, *relays, *workers), cpu_before, strict=True)
    ]
    split = 1 + len(relays)
    return Sample(
        worker_s=tuple(at - announced for at in done),
        prepare_s=prepared,
        origin_sent=sent[0],
        relays_sent=sum(sent[1:]),
        cpu_s={"origin": used[0], "relays": sum(used[1:split]), "workers": sum(used[split:])},
    )
