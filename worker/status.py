"""What the worker knows about itself, in one value that loop, console and logs share."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

_RATE_WINDOW_S = 30.0


@dataclass(slots=True)
class Status:
    """Counters since start, except standing, which is the coordinator's. Times are of the monotonic clock."""

    phase: str = "starting"
    policy_version: int | None = None
    fetching_version: int | None = None
    fetch_done: int = 0
    fetch_total: int = 0
    in_flight: int = 0
    outbox: int = 0
    generated: int = 0
    generated_tokens: int = 0
    receipts: int = 0
    refused: int = 0
    aborted: int = 0
    swaps: int = 0
    last_swap_s: float = 0.0
    swap_failure: str = ""  # why a newer version is not loaded
    credits: int = 0
    strikes: int = 0
    accepted: int = 0
    rejected: int = 0
    pending: int = 0
    banned: str = ""
    last_reason: str = ""
    waiting_for: str = ""
    twin: int = 0  # rollouts of our key that another worker handed in
    _tokens: deque[tuple[float, int]] = field(default_factory=deque)

    def count_tokens(self, count: int, now: float | None = None) -> None:
        """Note generated tokens for the rate."""
        now = time.monotonic() if now is None else now
        self.generated_tokens += count
        self._tokens.append((now, count))
        self._forget(now)

    def tokens_per_second(self, now: float | None = None) -> float:
        """Over the last half minute."""
        now = time.monotonic() if now is None else now
        self._forget(now)
        return sum(count for _, count in self._tokens) / _RATE_WINDOW_S

    def _forget(self, now: float) -> None:
        while self._tokens and self._tokens[0][0] < now - _RATE_WINDOW_S:
            self._tokens.popleft()

    def as_dict(self) -> dict[str, object]:
        """For --json."""
        names = [name for name in self.__dataclass_fields__ if not name.startswith("_")]
        return {name: getattr(self, name) for name in names} | {"tokens_per_second": round(self.tokens_per_second(), 1)}
