"""What everybody who asks is told alike is made once: the load that it puts on the database does not depend on how many ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class Shared(Generic[V]):
    """A value that is made by one task at a time, whoever asks meanwhile waits for the same, and is kept for `kept_s`.

    What `make` raises goes to all who wait and is not kept. `clock`: monotonic seconds.
    """

    def __init__(
        self, make: Callable[[], Awaitable[V]], kept_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._make = make
        self._kept_s = kept_s
        self._clock = clock
        self._kept: tuple[V, float] | None = None  # and until when
        self._task: asyncio.Task[V] | None = None

    async def get(self) -> V:
        """The value. A caller that is cancelled takes nothing from the others."""
        if self._kept is not None and self._clock() < self._kept[1]:
            return self._kept[0]
        if self._task is None:
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(_heard)
        return await asyncio.shield(self._task)

    def forget(self) -> None:
        """Who asks from now on is told what is so from now on, even if a value is being made."""
        self._kept = None
        self._task = None

    async def _run(self) -> V:
        me = asyncio.current_task()
        try:
            value = await self._make()
            if self._task is me:
                self._kept = value, self._clock() + self._kept_s
            return value
        finally:
            if self._task is me:
                self._task = None


class Derived(Generic[V]):
    """What `make` makes of its sources, kept as long as they are the very same objects."""

    def __init__(self, make: Callable[..., V]) -> None:
        self._make = make
        self._kept: tuple[tuple[Any, ...], V] | None = None

    def of(self, *sources: Any) -> V:
        if self._kept is None or any(old is not new for old, new in zip(self._kept[0], sources, strict=True)):
            self._kept = sources, self._make(*sources)
        return self._kept[1]


def _heard(task: asyncio.Task[Any]) -> None:
    """A failure is told to whoever waits; where all have gone, nobody needs to hear of it."""
    if not task.cancelled():
        task.exception()
