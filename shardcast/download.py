"""Fills a partial version from many sources at once.

Loops: `parallel` tasks each take the next missing shard (a demanded one first), choose a source, and stream the
shard to disk while hashing it. A cut connection is resumed by Range from whichever source is chosen next. If bytes
from two sources make a wrong shard, neither is proven guilty, and the shard is fetched again from one source alone.
The download ends when every shard is verified, and gives up when no byte came for `deadline_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from protocol.errors import SourceFault
from protocol.manifest import Digest
from shardcast.bandwidth import Throttle
from shardcast.config import ClientLimits
from shardcast.metrics import ShardcastMetrics
from shardcast.partial import PartialVersion, ShardWriter
from shardcast.pool import SourcePool
from shardcast.sources import Misbehaved, Source, Unavailable, WriteChunks
from shardcast.storage import VersionStore

log = logging.getLogger("shardcast")

OnShard = Callable[[int], None]
_IDLE_S = 0.5


class ShardQueue:
    """Indexes of missing shards: in the given order, but demanded ones first. Each is taken once."""

    def __init__(self, order: Iterable[int]) -> None:
        self._heap = [(1, position, index) for position, index in enumerate(order)]
        self._waiting = {index for _, _, index in self._heap}
        self._demands = 0

    def take(self) -> int | None:
        """The next shard to fetch, or None when all are taken."""
        while self._heap:
            _, _, index = heapq.heappop(self._heap)
            if index in self._waiting:
                self._waiting.remove(index)
                return index
        return None

    def demand(self, index: int) -> None:
        """Somebody waits for this shard: fetch it before the others."""
        if index in self._waiting:
            heapq.heappush(self._heap, (0, self._demands, index))
            self._demands += 1


class Download:
    """One run that fills one partial version. `on_shard` is called in the event loop for each verified shard."""

    def __init__(
        self,
        partial: PartialVersion,
        pool: SourcePool,
        limits: ClientLimits,
        *,
        store: VersionStore | None = None,
        on_shard: OnShard | None = None,
        on_bytes: Callable[[int], None] | None = None,
        throttle: Throttle | None = None,
        metrics: ShardcastMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._partial = partial
        self._pool = pool
        self._limits = limits
        self._store = store
        self._on_shard = on_shard
        self._on_bytes = on_bytes
        self._throttle = throttle
        self._metrics = metrics
        self._clock = clock
        self._queue = ShardQueue(partial.missing)
        self._last_byte = clock()

    def demand(self, index: int) -> None:
        """Fetch this shard before the others."""
        self._queue.demand(index)

    async def run(self) -> None:
        """Return when every shard is verified. Raises SourceFault saying what each source did wrong, DiskFullError."""
        self._last_byte = self._clock()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._limits.parallel):
                    group.create_task(self._work())
        except BaseExceptionGroup as group_error:
            raise _first_leaf(group_error) from None

    async def _work(self) -> None:
        while (index := self._queue.take()) is not None:
            if not await self._copy_local(index):
                await self._fetch(index)
            if self._on_shard:
                self._on_shard(index)

    async def _copy_local(self, index: int) -> bool:
        """Files that don't change between versions are copied from a version that is already here."""
        digest = self._partial.manifest.shards[index].digest
        location = self._store.locate(digest) if self._store else None
        if location is None or self._store is None:
            return False
        with self._store.reading(location.version), self._partial.writer(index) as writer:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(_copy, location.path, location.offset, writer)
            return writer.received == writer.size and self._partial.commit(index, writer.digest)

    async def _fetch(self, index: int) -> None:
        shard = self._partial.manifest.shards[index]
        contributors: set[str] = set()
        alone = False
        with self._partial.writer(index) as writer:
            while True:
                source = await self._next_source()
                if alone:
                    writer.restart()
                if writer.received == 0:
                    contributors.clear()
                contributors.add(source.url)
                if not await self._attempt(source, shard.digest, writer):
                    continue
                if self._partial.commit(index, writer.digest):
                    return
                if len(contributors) == 1:
                    fault: SourceFault = Misbehaved(f"{source.url}: served wrong bytes for {shard.digest}")
                    self._pool.failed(source, fault)
                else:
                    alone = True
                    fault = Unavailable(f"{source.url}: a shard pieced together from {len(contributors)} was wrong")
                    self._pool.failed(source, fault)
                writer.restart()

    async def _attempt(self, source: Source, digest: Digest, writer: ShardWriter) -> bool:
        """Ask one source for the rest of the shard; says whether it is all here. Faults are noted, not raised."""
        begin = self._clock()
        at_start = writer.received
        try:
            with self._pool.in_flight(source):
                await source.read_shard(digest, writer.size, at_start, self._write_to(writer, source))
        except SourceFault as fault:
            self._pool.failed(source, fault, progressed=writer.received > at_start)
            return False
        seconds = self._clock() - begin
        self._pool.succeeded(source, writer.size - at_start, seconds)
        if self._metrics:
            self._metrics.shard_seconds.observe(seconds)
        return True

    def _write_to(self, writer: ShardWriter, source: Source) -> WriteChunks:
        async def write(chunks: list[bytes]) -> None:
            # In a thread: hashing and writing release the GIL, and meanwhile the socket's buffer fills.
            await asyncio.to_thread(writer.write, chunks)
            count = sum(map(len, chunks))
            self._last_byte = self._clock()
            if self._on_bytes:
                self._on_bytes(count)
            if self._metrics:
                self._metrics.bytes_total.labels("in", source.url).inc(count)
            if self._throttle:
                await self._throttle.take(count)

        return write

    async def _next_source(self) -> Source:
        """Wait until a source is ready. Raises SourceFault when all are dropped or the deadline has passed."""
        while True:
            source = self._pool.choose()
            if source is not None and not self._overdue():
                return source
            wait = self._pool.next_ready()
            if wait is None:
                raise SourceFault(f"every source was dropped: {self._pool.report()}")
            if self._overdue():
                raise SourceFault(f"no byte came for {self._limits.deadline_s:.0f} s: {self._pool.report()}")
            await asyncio.sleep(min(max(wait, 0.01), _IDLE_S))

    def _overdue(self) -> bool:
        return self._clock() - self._last_byte > self._limits.deadline_s


def _copy(path: Path, offset: int, writer: ShardWriter) -> None:
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while writer.received < writer.size:
            chunk = file.read(min(writer.size - writer.received, 2**20))
            if not chunk:
                return
            writer.write([chunk])


def _first_leaf(group: BaseExceptionGroup) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
