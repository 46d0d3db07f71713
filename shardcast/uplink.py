"""Whose bytes leave next, where what is sent is bounded: turns go round the addresses, and within one by age.

So an address that asks for much at once waits for itself. A turn costs what is sent in it: nothing, if its client is gone.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardcast.bandwidth import TokenBucket


@dataclass(slots=True, eq=False)
class Slice:
    """One slice that waits. `gone`: whether nobody reads it any more."""

    count: int
    gone: Callable[[], bool]
    granted: asyncio.Future[bool]

    @property
    def waits(self) -> bool:
        """Whether it will cost anything."""
        return not self.granted.done() and not self.gone()


class Rounds:
    """Turns by address. Each round takes the oldest of each address."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[Slice]] = {}  # in the order of the round

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, address: str, turn: Slice) -> None:
        """The last of its address; a new address is the last of the round."""
        self._queues.setdefault(address, deque()).append(turn)

    def next(self) -> Slice:
        """The turn that is due. Raises StopIteration if there is none."""
        address = next(iter(self._queues))
        queue = self._queues.pop(address)
        turn = queue.popleft()
        if queue:
            self._queues[address] = queue
        return turn

    def ahead(self, address: str) -> Iterator[Slice]:
        """What would come before one more turn of this address, about: all of its own, and as many of each other."""
        own = [turn for turn in self._queues.get(address, ()) if turn.waits]
        yield from own
        for other, queue in self._queues.items():
            if other != address:
                yield from [turn for turn in queue if turn.waits][: len(own) + 1]


class Uplink:
    """`bytes_per_s` for all requests of a process, in bursts of a quarter of a second. Used from one event loop."""

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._bucket = TokenBucket(bytes_per_s, bytes_per_s / 4, clock())
        self._rounds = Rounds()
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def from_mbit(cls, mbit: float | None) -> Uplink | None:
        """Megabits per second (10^6), or None for no limit."""
        return cls(mbit * 1e6 / 8) if mbit else None

    def wait_s(self, address: str) -> float:
        """Seconds that what waits already would keep one more turn of this address waiting."""
        return sum(turn.count for turn in self._rounds.ahead(address)) / self._bytes_per_s

    async def turn(self, address: str, count: int, gone: Callable[[], bool]) -> bool:
        """Return when it is this one's turn: True, and `count` bytes are taken; False if its client is gone."""
        granted = asyncio.get_running_loop().create_future()
        self._rounds.add(address, Slice(count, gone, granted))
        if self._timer is None:
            self._serve()
        try:
            return bool(await granted)
        except asyncio.CancelledError:
            if not granted.cancelled() and granted.result():
                self.give_back(count)
            raise

    def give_back(self, count: int) -> None:
        """So many of the bytes that were taken were not sent."""
        self._bucket.take(-count, self._clock())
        if self._timer is not None:
            self._timer.cancel()
        self._serve()

    def _serve(self) -> None:
        """Give turns until the bytes are used up, and go on when there are more."""
        self._timer = None
        while self._rounds:
            delay = self._bucket.take(0, self._clock())
            if delay > 0:
                self._timer = asyncio.get_running_loop().call_later(delay, self._serve)
                return
            turn = self._rounds.next()
            if turn.granted.done():  # cancelled
                continue
            here = not turn.gone()
            if here:
                self._bucket.take(turn.count, self._clock())
            turn.granted.set_result(here)
