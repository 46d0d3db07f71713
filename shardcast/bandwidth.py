"""How fast bytes leave or come: a token bucket that bounds it, and a meter that measures it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable


class TokenBucket:
    """`rate` bytes per second, bursts of up to `burst` bytes. Time is an argument; debt is allowed.

    Whoever takes more than there is goes into debt and waits it off, so large takes are fair and never stuck.
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._at = now

    def take(self, count: int, now: float) -> float:
        """Take `count` bytes; returns the seconds to wait before going on."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate) - count
        self._at = now
        return max(0.0, -self._tokens / self._rate)


class Throttle:
    """A token bucket shared by the tasks of one process."""

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._bucket = TokenBucket(bytes_per_s, bytes_per_s / 4, clock())

    @classmethod
    def from_mbit(cls, mbit: float | None) -> Throttle | None:
        """Megabits per second (10^6), or None for no limit."""
        return cls(mbit * 1e6 / 8) if mbit else None

    def charge(self, count: int) -> None:
        """Bytes went another way and count as well: whoever takes next waits for them too."""
        self._bucket.take(count, self._clock())

    async def take(self, count: int) -> None:
        """Return when `count` more bytes may go."""
        delay = self._bucket.take(count, self._clock())
        if delay > 0:
            await asyncio.sleep(delay)


class RateMeter:
    """Bytes per second over about the last `window_s` seconds, recent ones weighing more."""

    def __init__(self, window_s: float = 5.0) -> None:
        self._window_s = window_s
        self._weighed = 0.0
        self._at: float | None = None
        self.since: float | None = None  # when the first byte was counted

    def add(self, count: int, now: float) -> None:
        """Count bytes."""
        self._decay(now)
        self._weighed += count
        if self.since is None:
            self.since = now

    def rate(self, now: float) -> float:
        """Bytes per second; 0 before the first."""
        self._decay(now)
        return self._weighed / self._window_s

    def _decay(self, now: float) -> None:
        if self._at is not None:
            self._weighed *= math.exp(-(now - self._at) / self._window_s)
        self._at = now
