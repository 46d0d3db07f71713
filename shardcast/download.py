"""Fills a partial version from many sources at once.

Loops: one `watch` per source learns which shards that source has. `parallel` slots each take the next choice of
`selection.choose` and stream that shard to disk while hashing it. A cut connection is resumed by Range from whichever
source is chosen next. A slot that finds nothing to ask races a straggler from a second source into a scratch file;
the loser is cancelled. The download ends when every shard is verified, and gives up when no byte came for `deadline_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import operator
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from protocol.errors import SourceFault
from shardcast import bits, selection
from shardcast.availability import Availability
from shardcast.bandwidth import RateMeter
from shardcast.config import ClientLimits
from shardcast.filling import Filling
from shardcast.partial import ShardWriter
from shardcast.pulse import Pulse
from shardcast.selection import Pick, View, Wish
from shardcast.sources import Misbehaved, NotYet, Source, Unknown, WriteChunks
from shardcast.transfer import Flight, Transfer, ended, in_thread, stop
from shardcast.watch import watch

_IDLE_S = 0.25


class Download:
    """One run that fills one partial version.

    `own_id`: the id of the relay that downloads, which makes it spare its origin; empty for everyone else. `busy`:
    whether that relay has clients to serve all the time, so that its siblings' clients come first.
    """

    def __init__(
        self,
        filling: Filling,
        limits: ClientLimits,
        *,
        rng: random.Random | None = None,
        own_id: str = "",
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._partial = filling.partial
        self._shards = filling.partial.manifest.shards
        self._pool = filling.pool
        self._limits = limits
        self._store = filling.store
        self._on_shard = filling.on_shard
        self._on_bytes = filling.on_bytes
        self._throttle = filling.throttle
        self._metrics = filling.metrics
        self._rng = rng or random.Random()
        self._clock = filling.clock
        self._own_id = own_id
        self._busy = busy
        self._availability = Availability(len(self._shards))
        self._missing = bits.of(filling.partial.missing)  # neither here nor on the way
        self._demanded = 0
        self._cut: dict[int, Transfer] = {}
        self._flights: dict[int, Flight] = {}
        self._asked: Counter[str] = Counter()  # requests in flight at each source
        self._failed: set[str] = set()  # sources whose last shard didn't come
        self._brought: Counter[str] = Counter()  # shards that came from each source
        self._pulse = Pulse()
        self._last_byte = self._begun = self._clock()
        self._siblings = RateMeter()
        self._backlog_since: float | None = None  # since when this relay is idle and siblings have something for it
        self._copying = filling.store is not None

    def demand(self, index: int) -> None:
        """Somebody waits for this shard: fetch it before the others."""
        self._demanded |= 1 << index
        self._pulse.beat()

    @property
    def coming(self) -> list[int]:
        """The shards that sources who have them are sending now."""
        return [
            index
            for index, flight in self._flights.items()
            if bits.has(self._availability.of(flight.source.url).have, index)
        ]

    async def run(self) -> None:
        """Return when every shard is verified. Raises SourceFault saying what each source did wrong, DiskFullError."""
        self._last_byte = self._begun = self._clock()
        try:
            async with asyncio.TaskGroup() as group:
                watches = [group.create_task(self._watch(source)) for source in self._pool.sources.values()]
                slots = [group.create_task(self._work()) for _ in range(self._limits.parallel)]
                slots.append(group.create_task(self._copy_locals()))
                await asyncio.wait(slots)
                for watching in watches:
                    watching.cancel()
        except BaseExceptionGroup as group_error:
            raise _first_leaf(group_error) from None
        finally:
            for transfer in self._cut.values():
                transfer.writer.close()
            self._cut.clear()

    async def _watch(self, source: Source) -> None:
        await watch(
            source,
            self._partial.manifest,
            self._availability,
            self._pool,
            limits=self._limits,
            pulse=self._pulse,
            own_id=self._own_id,
            on_answer=lambda: self._forgive(source),
            clock=self._clock,
        )

    def _forgive(self, source: Source) -> None:
        """A source that answers is there, whatever happened before; unless shards fail to come from it."""
        if source.url not in self._failed:
            self._pool.answered(source)

    async def _work(self) -> None:
        while len(self._partial.have) < len(self._shards):
            now = self._clock()
            views = self._views(now)
            wish = self._wish(views, now)
            pick = selection.choose(views, wish, now, self._rng, explore=self._limits.explore)
            if pick is not None:
                await self._fetch(pick)
            elif (hedge := self._choose_hedge(views, wish, now)) is not None:
                await self._hedge(hedge)
            else:
                await self._pause()

    # What to ask for

    def _views(self, now: float) -> dict[str, View]:
        blind = self._is_blind(now)
        spared = self._spared()
        busy = self._busy()
        views = {}
        for url, stats in self._pool.stats.items():
            holding = self._availability.of(url)
            have = self._availability.full if blind else holding.known(now)
            # One at a time at first: six that begin together also end together, and nothing can be passed on before.
            # And one at a time from siblings while both sides have clients to serve: more would share what is little.
            polite = busy and self._pool.sources[url].peer
            most = 1 if polite else min(self._limits.parallel_per_source, 1 + self._brought[url])
            views[url] = View(
                stats, have, holding.claims(now), url in spared, self._asked[url], most, url in self._failed
            )
        return views

    def _is_blind(self, now: float) -> bool:
        """Nothing came for so long that what the sources say they have can't be the whole truth."""
        return now - self._last_byte > self._limits.hint_patience_s

    def _spared(self) -> set[str]:
        """The sources that a relay with siblings asks as little of as it can: the origins, else all but the siblings."""
        if not self._own_id:
            return set()
        sources = self._pool.sources
        upstream = {url for url, source in sources.items() if not source.peer}
        origins = {url for url in upstream if self._availability.of(url).role == "origin"}
        spared = origins or upstream
        return spared if len(spared) < len(sources) else set()

    def _wish(self, views: dict[str, View], now: float) -> Wish:
        siblings = [url for url, view in views.items() if not view.spared and view.alive]
        if not any(view.spared for view in views.values()):
            return Wish(self._missing, self._demanded | bits.of(self._cut))
        lag = self._siblings_lag([views[url].have for url in siblings], now)
        ids = {self._availability.of(url).server_id for url in siblings if self._availability.of(url).there}
        own = selection.slice_of(ids, self._own_id, len(self._shards)) if ids else 0
        fresh = max([self._begun, *(self._availability.of(url).news_at for url in siblings)])
        only_own = (
            bool(ids) and self._busy() and now - fresh < self._limits.hint_patience_s
        )  # else they don't see to their slices
        return Wish(self._missing, bits.of(self._cut), own, only_own, spare=not lag and not self._is_blind(now))

    def _siblings_lag(self, haves: list[int], now: float) -> bool:
        held = functools.reduce(operator.or_, haves, 0)
        backlog = (self._missing & held).bit_count() * self._shards[0].size
        if not backlog or self._busy() or self._backlog_since is None:
            self._backlog_since = now
        since = now - self._backlog_since
        return selection.siblings_lag(backlog, self._siblings.rate(now), since, self._limits.sibling_patience_s)

    def _choose_hedge(self, views: dict[str, View], wish: Wish, now: float) -> Pick | None:
        flights = [
            selection.Flight(
                flight.source.url,
                index,
                self._shards[index].size - flight.at_start,
                flight.received,
                now - flight.begun,
            )
            for index, flight in self._flights.items()
            if flight.hedge is None and not flight.settled
        ]
        return selection.choose_hedge(views, wish, flights, now)

    async def _pause(self) -> None:
        """Wait for news. Raises SourceFault when all sources are dropped or the deadline has passed."""
        wait = self._pool.next_ready()
        if wait is None and not self._flights and not self._copying:
            raise SourceFault(f"every source was dropped: {self._pool.report()}")
        if self._clock() - self._last_byte > self._limits.deadline_s:
            raise SourceFault(f"no byte came for {self._limits.deadline_s:.0f} s: {self._pool.report()}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(max(wait or _IDLE_S, 0.01), _IDLE_S)):
                await self._pulse.wait()

    # How it comes

    async def _fetch(self, pick: Pick) -> None:
        """Ask one source for the rest of a shard. What came stays for the next attempt if it breaks off."""
        source = self._pool.sources[pick.source]
        transfer = self._cut.pop(pick.index, None) or Transfer(pick.index, self._partial.writer(pick.index))
        self._missing &= ~(1 << pick.index)
        transfer.begin(source)
        flight = Flight(source, transfer, self._clock(), transfer.writer.received)
        self._flights[pick.index] = flight
        flight.task = asyncio.create_task(self._attempt(source, pick.index, transfer.writer))
        done = False
        try:
            with self._asking(source):  # counted before anybody else chooses
                whole = await ended(flight.task)
            if whole and not flight.settled:
                flight.settled = done = self._commit(transfer, source)
            if flight.hedge is not None and not flight.settled:
                await flight.race_over.wait()
            if done:
                await stop(flight.hedge)
        finally:
            del self._flights[pick.index]
            if flight.settled:
                transfer.writer.close()
                self._waste(0 if done else transfer.writer.received)
            else:
                self._cut[pick.index] = transfer
                self._missing |= 1 << pick.index
        if done:
            self._verified(pick.index)
        self._pulse.beat()

    async def _hedge(self, pick: Pick) -> None:
        """Race a straggler from a second source. Whoever is first wins; the other is cancelled."""
        flight = self._flights[pick.index]
        source = self._pool.sources[pick.source]
        with self._partial.scratch(pick.index) as writer:
            flight.hedge = asyncio.create_task(self._attempt(source, pick.index, writer, quiet=True))
            try:
                with self._asking(source):
                    whole = await ended(flight.hedge)
                if whole and writer.digest != self._shards[pick.index].digest:
                    self._pool.failed(source, Misbehaved(f"{source.url}: served wrong bytes for shard {pick.index}"))
                elif whole and not flight.settled:
                    flight.settled = True  # from here on nobody else writes this shard
                    await stop(flight.task)
                    await in_thread(self._take_over, pick.index, writer)
                    self._report(writer.size - flight.transfer.writer.received)
                    self._verified(pick.index)
                    return
                self._waste(writer.received)
            finally:
                flight.race_over.set()

    @contextlib.contextmanager
    def _asking(self, source: Source) -> Iterator[None]:
        """Count a request while it lasts."""
        self._asked[source.url] += 1
        try:
            with self._pool.in_flight(source):
                yield
        finally:
            self._asked[source.url] -= 1

    def _take_over(self, index: int, scratch: ShardWriter) -> None:
        with self._partial.writer(index) as writer:
            scratch.copy_to(writer)
            committed = self._partial.commit(index, writer.digest)
            assert committed, "the scratch file held the right bytes"

    def _commit(self, transfer: Transfer, source: Source) -> bool:
        if self._partial.commit(transfer.index, transfer.writer.digest):
            return True
        self._waste(transfer.writer.received)
        self._pool.failed(source, transfer.blame(source))
        return False

    def _verified(self, index: int) -> None:
        if self._on_shard:
            self._on_shard(index)
        self._pulse.beat()

    async def _attempt(self, source: Source, index: int, writer: ShardWriter, *, quiet: bool = False) -> bool:
        """Ask one source for the rest of the shard; says whether it is all here. Faults are noted, not raised."""
        begin = self._clock()
        at_start = writer.received
        digest = self._shards[index].digest
        try:
            await source.read_shard(digest, writer.size, at_start, self._write_to(writer, source, quiet))
        except SourceFault as fault:
            if isinstance(fault, (NotYet, Unknown)):
                self._availability.retract(source.url, index, self._clock())
            else:
                self._failed.add(source.url)
            self._pool.failed(source, fault, progressed=writer.received > at_start)
            return False
        self._failed.discard(source.url)
        self._brought[source.url] += 1
        seconds = self._clock() - begin
        self._pool.succeeded(source, writer.size - at_start, seconds)
        if self._metrics:
            self._metrics.shard_seconds.observe(seconds)
        return True

    def _write_to(self, writer: ShardWriter, source: Source, quiet: bool) -> WriteChunks:
        async def write(chunks: list[bytes]) -> None:
            # In a thread: hashing and writing release the GIL, and meanwhile the socket's buffer fills.
            await in_thread(writer.write, chunks)
            count = sum(map(len, chunks))
            self._last_byte = now = self._clock()
            if not quiet:
                self._report(count)
            if self._own_id and source.url not in self._spared():
                self._siblings.add(count, now)
            if self._metrics:
                self._metrics.count_received(self._kind(source), count)
            if self._throttle:
                await self._throttle.take(count)

        return write

    def _kind(self, source: Source) -> str:
        return self._availability.of(source.url).role or ("relay" if source.peer else "origin")

    def _report(self, count: int) -> None:
        if self._on_bytes and count > 0:
            self._on_bytes(count)

    def _waste(self, count: int) -> None:
        if self._metrics and count:
            self._metrics.wasted_bytes.inc(count)

    # What is here already

    async def _copy_locals(self) -> None:
        """Files that don't change between versions are copied from a version that is already here."""
        if self._store is None:
            return
        local = [index for index in bits.indexes(self._missing) if self._store.locate(self._shards[index].digest)]
        self._missing &= ~bits.of(local)
        for index in local:
            if await self._copy_local(index):
                self._verified(index)
            else:
                self._missing |= 1 << index
        self._copying = False
        self._pulse.beat()

    async def _copy_local(self, index: int) -> bool:
        assert self._store is not None
        location = self._store.locate(self._shards[index].digest)
        if location is None:
            return False
        with self._store.reading(location.version), self._partial.writer(index) as writer:
            with contextlib.suppress(OSError):
                await in_thread(_copy, location.path, location.offset, writer)
            return writer.received == writer.size and self._partial.commit(index, writer.digest)


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
