"""Prometheus metrics of one SHARDCAST process, in a registry of its own."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from shardcast.bandwidth import RateMeter

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class ShardcastMetrics:
    """`peer` is the kind of party that bytes came from or went to: origin, relay, or client. Never an address."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._meter_in, self._meter_out = RateMeter(), RateMeter()
        self.bytes_sent = 0  # since the start
        self.registry = CollectorRegistry()
        self.bytes_total = Counter(
            "rollswarm_shardcast_bytes",
            "Bytes of shards received and sent.",
            ["direction", "peer"],
            registry=self.registry,
        )
        self.wasted_bytes = Counter(
            "rollswarm_shardcast_wasted_bytes",
            "Bytes received for nothing: the loser of a race for a straggling shard, and wrong bytes.",
            registry=self.registry,
        )
        self.rotten_shards = Counter(
            "rollswarm_shardcast_rotten_shards",
            "Shards that were found wrong on this disk by reading them again, and fetched anew.",
            registry=self.registry,
        )
        self.ways = Counter(
            "rollswarm_shardcast_versions",
            "Versions that became complete here, by how they came: full, packed, delta, or mixed (one that failed in part).",
            ["way"],
            registry=self.registry,
        )
        self.fallbacks = Counter(
            "rollswarm_shardcast_delta_fallbacks",
            "Versions that were fetched in full because their delta was of no use here, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.reported_fallbacks = Counter(
            "rollswarm_shardcast_reported_delta_fallbacks",
            "The same as clients tell it of themselves; anyone may say so.",
            ["reason"],
            registry=self.registry,
        )
        self.shard_seconds = Histogram(
            "rollswarm_shardcast_shard_seconds",
            "Seconds from asking for a shard until it was on disk and verified.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.version = Gauge("rollswarm_shardcast_version", "The newest complete version here.", registry=self.registry)
        self.version.set(-1)
        self.lag_versions = Gauge(
            "rollswarm_shardcast_lag_versions",
            "How many versions the newest complete one here is behind the newest announced.",
            registry=self.registry,
        )

        self.lag_seconds = Gauge(
            "rollswarm_shardcast_lag_seconds",
            "For how long a newer version than the newest complete one here has been known, or it couldn't be asked "
            "whether there is one; 0 if neither.",
            registry=self.registry,
        )
        self.refused = Counter(
            "rollswarm_shardcast_refused_connections",
            "Connections closed at once: too many in all, or from one address.",
            ["reason"],
            registry=self.registry,
        )
        self._behind_since: float | None = None
        self._lost_since: float | None = None
        self.lag_seconds.set_function(lambda: self.behind_s)

    def show_quota(self, left_bytes: Callable[[], float]) -> None:
        """Add a gauge of what may still be sent this month: only relays that have a quota show one."""
        gauge = Gauge(
            "rollswarm_shardcast_quota_left_bytes",
            "What this relay may still send this calendar month (UTC).",
            registry=self.registry,
        )
        gauge.set_function(left_bytes)

    def count_received(self, kind: str, count: int) -> None:
        """Bytes came from a kind of source."""
        self.bytes_total.labels("in", kind if kind in ("origin", "relay") else "origin").inc(count)
        self._meter_in.add(count, self._clock())

    def count_sent(self, to_relay: bool, count: int) -> None:
        """Bytes went to relays or to everyone else (a relay says so itself; it proves nothing)."""
        self.bytes_total.labels("out", "relay" if to_relay else "client").inc(count)
        self._meter_out.add(count, self._clock())
        self.bytes_sent += count

    @property
    def rate_in(self) -> float:
        """Bytes per second that come now."""
        return self._meter_in.rate(self._clock())

    @property
    def rate_out(self) -> float:
        """Bytes per second that go now."""
        return self._meter_out.rate(self._clock())

    def count_refused(self, reason: str) -> None:
        """A connection was closed at once."""
        self.refused.labels(reason).inc()

    def set_versions(self, complete: int | None, announced: int | None) -> None:
        """Set the two gauges; None is "no version yet"."""
        have = -1 if complete is None else complete
        lag = max(0, (-1 if announced is None else announced) - have)
        self.version.set(have)
        self.lag_versions.set(lag)
        self._behind_since = None if not lag else self._behind_since or self._clock()

    def set_lost(self, since: float | None) -> None:
        """Since when, by the clock, the newest version could not be learnt of, or not be begun; None if it can."""
        self._lost_since = since

    @property
    def lost_s(self) -> float | None:
        """For how long the newest version could not be learnt of, or not be begun; None if it can."""
        return None if self._lost_since is None else self._clock() - self._lost_since

    @property
    def behind_s(self) -> float:
        """For how long a newer version than the newest complete one here has been known, or there may have been one."""
        known = 0.0 if self._behind_since is None else self._clock() - self._behind_since
        return max(known, self.lost_s or 0.0)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)
