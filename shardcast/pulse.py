"""An event that can happen again and again: whoever waits is woken by the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Pulse:
    """Used from one event loop. Nobody misses a beat between looking at the state and waiting: both are synchronous."""

    def __init__(self) -> None:
        self._next = asyncio.Event()
        self.waiting = 0  # tasks that wait now

    def beat(self) -> None:
        """Wake everyone who waits now."""
        current, self._next = self._next, asyncio.Event()
        current.set()

    async def wait(self) -> None:
        """Return at the next beat."""
        self.waiting += 1
        try:
            await self._next.wait()
        finally:
            self.waiting -= 1

    async def wait_until(self, done: Callable[[], bool], wait_s: float) -> bool:
        """Look at `done` now and after each beat; says whether it came true within `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                while not done():
                    await self.wait()
        except TimeoutError:
            return done()
        return True
