"""Which source the next shard is asked from. Pure: time and randomness are arguments.

A source's score is its throughput (EMA, bytes/s) times its success (EMA, 0 to 1), shared by the requests already in
flight there. With probability `explore` the choice is uniform, so a source that was slow an hour ago gets another
chance. A failure backs off exponentially; proof of misbehaviour (a bad byte, a redirect) bans.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

EMA = 0.3
MEASURED_FROM = 64 * 1024  # bytes
BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0
NOT_YET_S = 0.2  # a relay that doesn't have the shard yet is asked again after this


@dataclass(frozen=True, slots=True)
class SourceStats:
    """What is known of one source. `retry_at` and `banned_until` are seconds of the caller's monotonic clock."""

    throughput: float | None = None  # bytes/s of one request; None until one succeeded
    success: float = 1.0
    in_flight: int = 0
    failures_in_row: int = 0
    retry_at: float = 0.0
    bans: int = 0
    banned_until: float = 0.0
    last_fault: str = ""

    def is_ready(self, now: float) -> bool:
        """Neither backing off nor banned."""
        return now >= self.retry_at and now >= self.banned_until

    def is_troubled(self, now: float) -> bool:
        """Whether its last fault still stands: since then it has neither brought a shard nor answered."""
        return self.failures_in_row > 0 or not self.is_ready(now)


def started(stats: SourceStats) -> SourceStats:
    """A request is in flight."""
    return replace(stats, in_flight=stats.in_flight + 1)


def ended(stats: SourceStats) -> SourceStats:
    """A request is no longer in flight."""
    return replace(stats, in_flight=max(0, stats.in_flight - 1))


def succeeded(stats: SourceStats, received: int, seconds: float) -> SourceStats:
    """A request brought `received` good bytes in `seconds`. Few bytes say nothing of a pace, only that it answers."""
    throughput = stats.throughput
    if received >= MEASURED_FROM:
        rate = received / max(seconds, 1e-6)
        throughput = rate if throughput is None else (1 - EMA) * throughput + EMA * rate
    success = (1 - EMA) * stats.success + EMA
    return replace(stats, throughput=throughput, success=success, failures_in_row=0, retry_at=0.0)


def failed(stats: SourceStats, fault: str, now: float, jitter: float, progressed: bool = False) -> SourceStats:
    """A request failed in a way that may pass. `jitter` in [0, 1) spreads the retries of many clients.

    Requests that fail together, while the source already backs off, count as one failure in a row; and one that
    brought bytes before it was cut (`progressed`) is the first.
    """
    success = (1 - EMA) * stats.success
    if now < stats.retry_at:
        return replace(stats, success=success, last_fault=fault)
    in_row = 1 if progressed else stats.failures_in_row + 1
    pause = backoff(in_row, jitter)
    return replace(stats, success=success, failures_in_row=in_row, retry_at=now + pause, last_fault=fault)


def backoff(failures_in_row: int, jitter: float) -> float:
    """Seconds to wait after so many failures in a row: doubling, capped, between half and all of it."""
    full = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(failures_in_row - 1, 16))
    return full * (0.5 + jitter / 2)


def answered(stats: SourceStats) -> SourceStats:
    """The source is there again: what failed before it came back is forgiven."""
    return replace(stats, failures_in_row=0, retry_at=0.0)


def not_yet(stats: SourceStats, fault: str, now: float) -> SourceStats:
    """The source doesn't have the shard yet: no failure, only not now."""
    return replace(stats, retry_at=now + NOT_YET_S, last_fault=fault)


def banned(stats: SourceStats, fault: str, now: float, ban_s: float) -> SourceStats:
    """The source proved itself wrong. It is left out for `ban_s`, doubling each time."""
    until = now + ban_s * 2.0 ** min(stats.bans, 10)
    return replace(stats, success=0.0, bans=stats.bans + 1, banned_until=until, last_fault=fault)


def score(stats: SourceStats, best_throughput: float) -> float:
    """Expected bytes/s of one more request. A source that was never tried is taken for as fast as the best."""
    throughput = best_throughput if stats.throughput is None else stats.throughput
    return throughput * max(stats.success, 0.01) / (stats.in_flight + 1)


def choose(sources: Mapping[str, SourceStats], now: float, rng: random.Random, explore: float) -> str | None:
    """The source to ask next, or None if none is ready.

    Ties go to the one that stands first, so the order in which the user named the sources is a preference.
    """
    ready = [name for name, stats in sources.items() if stats.is_ready(now)]
    if not ready:
        return None
    if len(ready) > 1 and rng.random() < explore:
        return rng.choice(ready)
    best = max((sources[name].throughput or 1.0 for name in ready), default=1.0)
    return max(ready, key=lambda name: score(sources[name], best))


def next_ready(sources: Mapping[str, SourceStats], now: float) -> float | None:
    """Seconds until a source may be asked again, or None if all are banned."""
    waits = [max(0.0, stats.retry_at - now) for stats in sources.values() if now >= stats.banned_until]
    return min(waits, default=None)
