"""A training run's versions in tests of SHARDCAST, and a client that tells which ways its fetches took."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from protocol.manifest import sign_manifest
from shardcast.client import Progress, ShardcastClient, Way
from shardcast.delta.errors import FallbackReason
from shardcast.metrics import ShardcastMetrics
from shardcast.origin import Origin
from shardcast.publish import Described, announce, build_manifest, make_delta, pack, stage
from shardcast.swarm import Swarm
from tests.shardcast_network import FAST, SHARD, SOON, TRAINER, Version, assert_same, client
from tests.unit.shardcast.delta.versions import safetensors, step, words

WORDS = 200_000
LIMITS = replace(FAST, deadline_s=SOON, delta_deadline_s=2.0)


class Run:
    """A training run's versions, each a delta to the one before unless told otherwise."""

    def __init__(self, root: Path, seed: int = 0) -> None:
        self._root = root
        self._weights = words(WORDS, seed=seed)
        self.versions: list[Version] = []

    def add(self, *, delta: bool = True, change: bool = True, packed: bool = False) -> Version:
        number = len(self.versions)
        if number and change:
            self._weights = step(self._weights, 0.01, seed=number)
        folder = self._root / f"v{number}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(safetensors({"w": ("BF16", self._weights.tobytes())}))
        (folder / "config.json").write_text('{"the": "same in every version"}')
        manifest = build_manifest(folder, run_id="run", policy_version=number, shard_bytes=SHARD)
        if delta and number:
            base = self.versions[-1]
            made = make_delta(base.folder, base.manifest, folder, manifest, self.blob(number), shard_bytes=SHARD)
            assert made is not None and made.delta is not None
            assert made.delta.size < manifest.total_bytes / 10
            manifest = made
        described = Described(manifest, None)
        if packed:
            found = pack(folder, manifest, self.packed(number), shard_bytes=SHARD)
            assert found is not None
            described = found
        version = Version(folder, described.manifest, sign_manifest(described.manifest, TRAINER), described.torrent)
        self.versions.append(version)
        return version

    def blob(self, number: int) -> Path:
        return self._root / f"v{number}.delta"

    def packed(self, number: int) -> Path:
        return self._root / f"v{number}.packed"

    async def publish(self, url: str, data: Path, numbers: Iterable[int]) -> None:
        for number in numbers:
            version = self.versions[number]
            blob = None if version.manifest.delta is None else self.blob(number)
            packed = None if version.manifest.packed is None else self.packed(number)
            await stage(version.folder, data, number, move=False, delta=blob, packed=packed, torrent=version.torrent)
            await announce(url, version.envelope)


def sent(origin: Origin) -> float:
    registry = origin.catalog.metrics.registry
    return sum(
        registry.get_sample_value("rollswarm_shardcast_bytes_total", {"direction": "out", "peer": peer}) or 0.0
        for peer in ("client", "relay")
    )


def count(metrics: ShardcastMetrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"rollswarm_shardcast_{name}_total", labels) or 0.0


class Fetcher:
    """A client with metrics and the ways that its fetches took."""

    def __init__(self, url: str, cache: Path, swarm: Swarm | None = None) -> None:
        self.metrics = ShardcastMetrics()
        self.client: ShardcastClient = client([url], cache, limits=LIMITS, metrics=self.metrics, swarm=swarm)
        self.progress: list[Progress] = []

    async def fetch(self, version: Version) -> Way:
        path = await self.client.fetch(version.manifest.policy_version, version.digest, self.progress.append)
        assert_same(path, version)
        return self.progress[-1].way

    def fallbacks(self) -> dict[str, float]:
        counts = {
            reason.value: count(self.metrics, "delta_fallbacks", reason=reason.value) for reason in FallbackReason
        }
        return {reason: number for reason, number in counts.items() if number}


@asynccontextmanager
async def fetching(url: str, cache: Path, swarm: Swarm | None = None) -> AsyncIterator[Fetcher]:
    fetcher = Fetcher(url, cache, swarm)
    try:
        yield fetcher
    finally:
        await fetcher.client.close()
