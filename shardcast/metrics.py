"""Prometheus metrics of one SHARDCAST process, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class ShardcastMetrics:
    """`peer` is the kind of party that bytes came from or went to: origin, relay, or client. Never an address."""

    def __init__(self) -> None:
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

    def received(self, kind: str) -> Counter:
        """The counter of bytes that came from a kind of source."""
        return self.bytes_total.labels("in", kind if kind in ("origin", "relay") else "origin")

    def sent(self, to_relay: bool) -> Counter:
        """The counter of bytes that went to relays or to everyone else (a relay says so itself; it proves nothing)."""
        return self.bytes_total.labels("out", "relay" if to_relay else "client")

    def set_versions(self, complete: int | None, announced: int | None) -> None:
        """Set the two gauges; None is "no version yet"."""
        have = -1 if complete is None else complete
        self.version.set(have)
        self.lag_versions.set(max(0, (-1 if announced is None else announced) - have))

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)
