"""The sources of one client and what it has learned of them. The choice itself is `selection.choose`."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from shardcast import routing
from shardcast.routing import SourceStats
from shardcast.sources import Misbehaved, NotYet, Source, Unknown

log = logging.getLogger("shardcast")


class SourcePool:
    """Mutable state around the pure functions of `routing`; used from one event loop."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        ban_s: float,
        rng: random.Random,
        clock: Callable[[], float],
    ) -> None:
        self._sources = {source.url: source for source in sources}
        self._stats = {source.url: SourceStats() for source in sources}
        self._ban_s = ban_s
        self._rng = rng
        self._clock = clock

    @property
    def stats(self) -> dict[str, SourceStats]:
        """What is known of each source, by URL."""
        return dict(self._stats)

    @property
    def sources(self) -> Mapping[str, Source]:
        """The sources by URL."""
        return self._sources

    def usable(self) -> list[Source]:
        """All sources that are not banned, best first."""
        now = self._clock()
        best = max((stats.throughput or 1.0 for stats in self._stats.values()), default=1.0)
        names = [name for name, stats in self._stats.items() if now >= stats.banned_until]
        names.sort(key=lambda name: -routing.score(self._stats[name], best))
        return [self._sources[name] for name in names]

    def next_ready(self) -> float | None:
        """Seconds until a source may be asked again, or None if all are banned."""
        return routing.next_ready(self._stats, self._clock())

    def add(self, source: Source) -> None:
        """One source more; a known one stays as it is."""
        if source.url not in self._sources:
            self._sources[source.url] = source
            self._stats[source.url] = SourceStats()

    @contextmanager
    def in_flight(self, source: Source) -> Iterator[None]:
        """Count a request while it lasts."""
        self._stats[source.url] = routing.started(self._stats[source.url])
        try:
            yield
        finally:
            self._stats[source.url] = routing.ended(self._stats[source.url])

    def succeeded(self, source: Source, received: int, seconds: float) -> None:
        """A shard came, and was right."""
        self._stats[source.url] = routing.succeeded(self._stats[source.url], received, seconds)

    def failed(self, source: Source, fault: Exception, *, progressed: bool = False) -> None:
        """Take note of a fault: not yet, may pass, or proof. `progressed`: bytes came before it."""
        stats = self._stats[source.url]
        now = self._clock()
        if isinstance(fault, (NotYet, Unknown)):  # it may well have what another version needs
            self._stats[source.url] = routing.not_yet(stats, str(fault), now)
            return
        if isinstance(fault, Misbehaved):
            self._stats[source.url] = banned = routing.banned(stats, str(fault), now, self._ban_s)
            log.warning(
                "dropped a source for %.0f s: %s",
                banned.banned_until - now,
                fault,
                extra={"action": "ban_source", "source": source.url},
            )
            return
        self._stats[source.url] = later = routing.failed(stats, str(fault), now, self._rng.random(), progressed)
        log.warning(
            "source failed, next try in %.1f s: %s",
            later.retry_at - now,
            fault,
            extra={"action": "retry_source", "source": source.url},
        )

    def exclude(self, source: Source) -> None:
        """The source turned out to be the asker itself: never ask it again."""
        stats = self._stats[source.url]
        self._stats[source.url] = replace(
            stats, banned_until=math.inf, last_fault=f"{source.url}: is this relay itself"
        )

    def report(self) -> str:
        """One clause per source: what it did wrong last."""
        now = self._clock()
        clauses = []
        for url, stats in self._stats.items():
            fault = stats.last_fault or f"{url}: nothing yet"
            clauses.append(f"{fault} (dropped)" if now < stats.banned_until else fault)
        return "; ".join(clauses)
