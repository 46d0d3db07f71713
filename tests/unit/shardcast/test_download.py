"""shardcast.download: the order in which shards are fetched, and whom a wrong shard is blamed on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import SourceFault
from protocol.manifest import Digest, sign_manifest
from protocol.signing import Identity
from shardcast.config import ClientLimits
from shardcast.download import Download, ShardQueue
from shardcast.publish import build_manifest
from shardcast.sources import Misbehaved, Unavailable, WriteChunks
from shardcast.storage import VersionStore

DATA = b"0123456789"
TRAINER = Identity.from_seed(b"t" * 32)


class Scripted:
    """A source that sends given bytes from the asked offset on, then may break off."""

    def __init__(self, url: str, data: bytes) -> None:
        self.url = url
        self.data = data

    async def read_shard(self, digest: Digest, size: int, offset: int, write: WriteChunks) -> None:
        if offset < len(self.data):
            await write([self.data[offset:]])
        if len(self.data) < size:
            raise Unavailable(f"{self.url}: cut")


class ScriptedPool:
    """Hands out sources in a fixed order and notes what they are blamed for."""

    def __init__(self, order: Iterator[Scripted]) -> None:
        self._order = order
        self.faults: list[tuple[str, type]] = []
        self.good: list[str] = []

    def choose(self) -> Scripted | None:
        return next(self._order, None)

    def next_ready(self) -> float | None:
        return None

    def report(self) -> str:
        return "the script ended"

    def in_flight(self, source: Scripted) -> Any:
        return nullcontext()

    def failed(self, source: Scripted, fault: Exception, *, progressed: bool = False) -> None:
        self.faults.append((source.url, type(fault)))

    def succeeded(self, source: Scripted, received: int, seconds: float) -> None:
        self.good.append(source.url)


async def download(tmp_path: Path, *order: Scripted) -> tuple[ScriptedPool, bytes]:
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "f").write_bytes(DATA)
    manifest = build_manifest(folder, run_id="r", policy_version=0)
    store = VersionStore(tmp_path / "store", {TRAINER.key_id})
    partial = store.open_partial(sign_manifest(manifest, TRAINER), manifest)
    pool = ScriptedPool(iter(order))
    try:
        await Download(partial, pool, ClientLimits(parallel=2)).run()  # type: ignore[arg-type]
        return pool, (store.finish(partial).path / "f").read_bytes()
    finally:
        partial.close()


async def test_a_wrong_shard_of_two_sources_is_fetched_again_from_one_alone(tmp_path: Path) -> None:
    liar, honest = Scripted("liar", b"XXXX"), Scripted("honest", DATA)
    pool, data = await download(tmp_path, liar, honest, liar, honest)
    assert data == DATA
    assert Misbehaved not in [kind for _, kind in pool.faults]  # nothing is proven against either


async def test_a_wrong_shard_of_one_source_proves_it_guilty(tmp_path: Path) -> None:
    pool, data = await download(tmp_path, Scripted("liar", b"X" * 10), Scripted("honest", DATA))
    assert data == DATA
    assert pool.faults == [("liar", Misbehaved)]


async def test_a_cut_shard_goes_on_at_another_source(tmp_path: Path) -> None:
    pool, data = await download(tmp_path, Scripted("cut", DATA[:4]), Scripted("rest", b"????" + DATA[4:]))
    assert data == DATA and pool.good == ["rest"]


async def test_without_any_source_the_fault_is_one_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(SourceFault, match="the script ended"):
        await download(tmp_path)


def take_all(queue: ShardQueue) -> list[int]:
    taken = []
    while (index := queue.take()) is not None:
        taken.append(index)
    return taken


def test_shards_are_taken_in_order_each_once() -> None:
    assert take_all(ShardQueue([4, 0, 2])) == [4, 0, 2]


def test_demanded_shards_come_first_in_the_order_of_demand() -> None:
    queue = ShardQueue(range(5))
    queue.demand(4)
    queue.demand(3)
    queue.demand(4)
    assert take_all(queue) == [4, 3, 0, 1, 2]


def test_what_is_taken_or_unknown_can_not_be_demanded() -> None:
    queue = ShardQueue(range(2))
    assert queue.take() == 0
    queue.demand(0)
    queue.demand(9)
    assert take_all(queue) == [1]
