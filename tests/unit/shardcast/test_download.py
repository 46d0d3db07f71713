"""shardcast.download: whom a wrong shard is blamed on, what is resumed, and how stragglers are raced."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from protocol.errors import SourceFault
from protocol.manifest import Digest, sign_manifest
from protocol.signing import Identity
from shardcast.config import ClientLimits
from shardcast.download import Download
from shardcast.filling import Filling
from shardcast.have import Have
from shardcast.metrics import ShardcastMetrics
from shardcast.pool import SourcePool
from shardcast.publish import build_manifest
from shardcast.sources import Unavailable, Unknown, WriteChunks
from shardcast.storage import VersionStore

DATA = b"0123456789"
TRAINER = Identity.from_seed(b"t" * 32)
LIMITS = ClientLimits(parallel=2, explore=0.0, deadline_s=100.0)
SOON = 20.0

Answer = Callable[[WriteChunks, int], Awaitable[None]]


class Scripted:
    """A source whose answers are given one by one; the last one repeats. `have` None: it can't say."""

    peer = False

    def __init__(self, url: str, *answers: bytes | Answer, have: list[int] | None = None) -> None:
        self.url = url
        self._answers = list(answers)
        self._have = have
        self.asked: list[Digest] = []

    async def have(self, total: Digest, count: int, epoch: str, after: int, wait_s: float) -> Have | None:
        if self._have is None:
            raise Unknown(f"{self.url}: can't say")
        return Have("relay", self.url, len(self._have) == count, "e", 0, tuple(self._have))

    async def read_shard(self, digest: Digest, size: int, offset: int, write: WriteChunks) -> None:
        self.asked.append(digest)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if not isinstance(answer, bytes):
            await answer(write, offset)
            return
        if offset < len(answer):
            await write([answer[offset:]])
        if len(answer) < size:
            raise Unavailable(f"{self.url}: cut")


class Run:
    """A download of one file from scripted sources, and what became of it."""

    def __init__(self, tmp_path: Path, *sources: Scripted, data: bytes = DATA, shard_bytes: int = 10) -> None:
        folder = tmp_path / "made"
        folder.mkdir()
        (folder / "f").write_bytes(data)
        manifest = build_manifest(folder, run_id="r", policy_version=0, shard_bytes=shard_bytes)
        self._store = VersionStore(tmp_path / "store", {TRAINER.key_id})
        self._partial = self._store.open_partial(sign_manifest(manifest, TRAINER), manifest)
        self.digests = [shard.digest for shard in manifest.shards]
        self.metrics = ShardcastMetrics()
        self.pool = SourcePool(sources, ban_s=60.0, rng=random.Random(1), clock=self._clock)  # type: ignore[arg-type]
        self.verified: list[int] = []

    @staticmethod
    def _clock() -> float:
        return 10 * asyncio.get_running_loop().time()  # stragglers are judged in a tenth of the time

    async def data(self) -> bytes:
        try:
            async with asyncio.timeout(SOON):
                filling = Filling(
                    self._partial,
                    self.pool,
                    metrics=self.metrics,
                    clock=self._clock,
                    on_shard=self.verified.append,
                )
                await Download(filling, LIMITS, rng=random.Random(1)).run()
            return (self._store.finish(self._partial).path / "f").read_bytes()
        finally:
            self._partial.close()

    def wasted(self) -> float:
        value = self.metrics.registry.get_sample_value("rollswarm_shardcast_wasted_bytes_total")
        assert value is not None
        return value


async def test_a_wrong_shard_of_two_sources_is_fetched_again_from_one_alone(tmp_path: Path) -> None:
    liar, honest = Scripted("liar", b"XXXX"), Scripted("honest", DATA)
    run = Run(tmp_path, liar, honest)
    assert await run.data() == DATA
    assert [stats.bans for stats in run.pool.stats.values()] == [0, 0]  # nothing is proven against either
    assert run.wasted() == len(DATA)


async def test_a_wrong_shard_of_one_source_proves_it_guilty(tmp_path: Path) -> None:
    run = Run(tmp_path, Scripted("liar", b"X" * 10), Scripted("honest", DATA))
    assert await run.data() == DATA
    assert {url: stats.bans for url, stats in run.pool.stats.items()} == {"liar": 1, "honest": 0}


async def test_a_cut_shard_goes_on_at_another_source(tmp_path: Path) -> None:
    run = Run(tmp_path, Scripted("cut", DATA[:4]), Scripted("rest", b"????" + DATA[4:]))
    assert await run.data() == DATA
    assert run.wasted() == 0


async def test_when_all_sources_lied_the_fault_says_which(tmp_path: Path) -> None:
    run = Run(tmp_path, Scripted("a", b"X" * 10), Scripted("b", b"Y" * 10))
    with pytest.raises(SourceFault, match=r"every source was dropped: a: served wrong bytes.*; b: served wrong"):
        await run.data()


async def test_sources_are_asked_for_what_they_have(tmp_path: Path) -> None:
    data = bytes(range(40))
    parts = [data[at : at + 10] for at in range(0, 40, 10)]
    run = Run(tmp_path, data=data)
    by_digest = dict(zip(run.digests, parts, strict=True))

    class Holder(Scripted):
        async def read_shard(self, digest: Digest, size: int, offset: int, write: WriteChunks) -> None:
            self.asked.append(digest)
            await write([by_digest[digest][offset:]])

    left, right = Holder("left", b"", have=[0, 1]), Holder("right", b"", have=[2, 3])
    run.pool = SourcePool([left, right], ban_s=60.0, rng=random.Random(1), clock=run._clock)  # type: ignore[list-item]
    assert await run.data() == data
    assert (set(left.asked), set(right.asked)) == (set(run.digests[:2]), set(run.digests[2:]))
    assert sorted(run.verified) == [0, 1, 2, 3]


async def test_a_straggler_is_raced_and_the_loser_cancelled(tmp_path: Path) -> None:
    cancelled = asyncio.Event()

    async def stuck(write: WriteChunks, offset: int) -> None:
        await write([DATA[:3]])
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    run = Run(tmp_path, Scripted("stuck", stuck), Scripted("fast", DATA))
    run.pool.failed(run.pool.sources["fast"], Unavailable("not at first"))  # so that `stuck` is chosen first
    assert await run.data() == DATA
    assert cancelled.is_set() and run.verified == [0]
    assert run.wasted() == 3


async def test_a_race_that_the_first_source_wins_keeps_its_bytes(tmp_path: Path) -> None:
    raced = asyncio.Event()

    async def late(write: WriteChunks, offset: int) -> None:
        await raced.wait()
        await write([DATA])

    async def slower(write: WriteChunks, offset: int) -> None:
        await write([b"??"])
        raced.set()
        await asyncio.Event().wait()

    run = Run(tmp_path, Scripted("late", late), Scripted("slower", slower))
    run.pool.failed(run.pool.sources["slower"], Unavailable("not at first"))
    assert await run.data() == DATA
    assert run.wasted() == 2


async def test_a_race_with_a_liar_bans_the_liar_alone(tmp_path: Path) -> None:
    raced = asyncio.Event()

    async def late(write: WriteChunks, offset: int) -> None:
        await raced.wait()
        await write([DATA])

    async def lie(write: WriteChunks, offset: int) -> None:
        await write([b"X" * 10])
        raced.set()

    run = Run(tmp_path, Scripted("late", late), Scripted("liar", lie))
    run.pool.failed(run.pool.sources["liar"], Unavailable("not at first"))
    assert await run.data() == DATA
    assert {url: stats.bans for url, stats in run.pool.stats.items()} == {"late": 0, "liar": 1}
