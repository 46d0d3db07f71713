"""One publication by this project's origin, relays and workers."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shardcast.netns import Network
from benchmarks.shardcast.processes import Process, all_say, running
from benchmarks.shardcast.report import Sample
from protocol.signing import Identity

START_S = 120.0
_ORIGIN_PORT, _RELAY_PORT = "8600", "8601"
_HOST = "benchmarks.shardcast.ours_host"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is published and how long it may take. `before`: the version that came before it, for a delta."""

    folder: Path
    before: Path
    shard_bytes: int
    scratch: Path  # emptied by the caller after each publication
    limit_s: float


@dataclass(frozen=True, slots=True)
class Deployment:
    """Everything that runs, while it runs."""

    net: Network
    plan: Plan
    seed: bytes
    origin: Process
    relays: Sequence[Process]
    workers: Sequence[Process]

    async def publish(self, version: int, folder: Path, base: Path | None = None, *, packed: bool = False) -> Sample:
        """Publish a folder and wait until every worker has it. With `base`, which was published before, as a delta."""
        senders = (self.net.origin, *self.net.relays)
        sent_before = [host.sent_bytes() for host in senders]
        cpu_before = self._cpu()
        publisher = running(
            self.net.origin,
            *(sys.executable, "-m", _HOST, "publish", "--origin", _url(self.net.origin.address, _ORIGIN_PORT)),
            *("--seed", self.seed.hex(), "--folder", str(folder), "--version", str(version)),
            *("--data", str(self.plan.scratch / "origin"), "--shard-bytes", str(self.plan.shard_bytes)),
            *([] if base is None else ["--base", str(base)]),
            *(["--packed"] if packed else []),
            log_folder=self.plan.scratch,
        )
        async with publisher as publishing:
            announced, prepared, needed = map(float, (await publishing.wait_for("announced", START_S)).split())
            done = [float(text) for text in await all_say(self.workers, "done", self.plan.limit_s)]
        sent = [host.sent_bytes() - already for host, already in zip(senders, sent_before, strict=True)]
        return Sample(
            worker_s=tuple(at - announced for at in done),
            prepare_s=prepared,
            needed=int(needed),
            origin_sent=sent[0],
            relays_sent=sum(sent[1:]),
            cpu_s={role: used - cpu_before[role] for role, used in self._cpu().items()},
        )

    async def settle(self, version: int) -> None:
        """Wait until the relays have the whole version, too."""
        urls = _options("--relay", [_url(host.address, _RELAY_PORT) for host in self.net.relays])
        waiting = running(
            self.net.origin,
            *(sys.executable, "-m", _HOST, "settle", "--version", str(version), *urls),
            log_folder=self.plan.scratch,
        )
        async with waiting as settling:
            await settling.wait_for("settled", self.plan.limit_s)

    def _cpu(self) -> dict[str, float]:
        roles = {"origin": [self.origin], "relays": self.relays, "workers": self.workers}
        return {role: sum(process.cpu_seconds() for process in processes) for role, processes in roles.items()}


async def publish_full(net: Network, plan: Plan, *, peers: bool = False, packed: bool = True) -> Sample:
    """Publish one version to workers that have none. `peers`: they swap pieces. `packed`: its packed form, too."""
    async with deployed(net, plan, peers=peers) as deployment:
        return await deployment.publish(0, plan.folder, packed=packed)


async def publish_delta(net: Network, plan: Plan) -> Sample:
    """Publish a version to workers that have the one before: what comes is the difference."""
    async with deployed(net, plan, peers=False) as deployment:
        await deployment.publish(0, plan.before)
        await deployment.settle(0)
        return await deployment.publish(1, plan.folder, plan.before)


@asynccontextmanager
async def deployed(net: Network, plan: Plan, *, peers: bool) -> AsyncIterator[Deployment]:
    """Start an origin, relays and workers, and stop them at the end."""
    seed = os.urandom(32)
    key = ("--trainer-key", Identity.from_seed(seed).key_id)
    hosts = (net.origin, *net.relays, *net.workers)
    async with AsyncExitStack() as stack:

        async def start(number: int, *command: str) -> Process:
            process = running(hosts[number], sys.executable, "-m", *command, log_folder=plan.scratch)
            return await stack.enter_async_context(process)

        def data(number: int) -> tuple[str, ...]:
            return (str(plan.scratch / hosts[number].role), *key)

        origin_url = _url(net.origin.address, _ORIGIN_PORT)
        listen = ("--host", net.origin.address, "--port", _ORIGIN_PORT)
        origin = await start(0, "shardcast.main", "origin", "--data-dir", *data(0), *listen)
        await origin.wait_for("ready", START_S)
        urls = [_url(host.address, _RELAY_PORT) for host in net.relays]
        relays = [
            await start(
                number,
                *("shardcast.main", "relay", "--origin", origin_url, "--data-dir", *data(number)),
                *("--host", hosts[number].address, "--port", _RELAY_PORT),
                *_options("--peer", [url for url in urls if url != urls[number - 1]]),
            )
            for number in range(1, 1 + len(net.relays))
        ]
        await all_say(relays, "ready", START_S)
        workers = [
            await start(
                number,
                *(_HOST, "worker", *_options("--source", urls), "--data", *data(number)),
                *(["--peers"] if peers else []),
            )
            for number in range(1 + len(net.relays), len(hosts))
        ]
        await all_say(workers, "ready", START_S)
        yield Deployment(net, plan, seed, origin, relays, workers)


def _url(address: str, port: str) -> str:
    return f"http://{address}:{port}"


def _options(name: str, values: Sequence[str]) -> list[str]:
    return [part for value in values for part in (name, value)]
