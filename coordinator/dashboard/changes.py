"""Who follows the run: one look at the database every two seconds tells all streams, however many they are.

The task that looks begins with the first stream and ends soon after the last; it tells every stream after each look, so that
one whose reader has gone is found out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from aiohttp import web

log = logging.getLogger(__name__)

_EVERY_S = 2.0
_LONGEST_S = 600.0
_CHANGED = b"data: changed\n\n"
_NOTHING_NEW = b": nothing new\n\n"


class Changes:
    """`look` reads something that differs whenever the run has changed."""

    def __init__(self, look: Callable[[], Awaitable[Any]], every_s: float = _EVERY_S) -> None:
        self._look = look
        self._every_s = every_s
        self._streams: set[asyncio.Queue[bool]] = set()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Streams that are open."""
        return len(self._streams)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: one whenever the run has changed since the look before; ends after ten minutes."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(_LONGEST_S), contextlib.aclosing(self.follow()) as followed:
                async for changed in followed:
                    await response.write(_CHANGED if changed else _NOTHING_NEW)
        return response

    async def follow(self) -> AsyncGenerator[bool, None]:
        """After every look, whether the run has changed since the one before; of the first look nothing is said but that."""
        # One place: who reads slowly is told once of all that changed meanwhile.
        told: asyncio.Queue[bool] = asyncio.Queue(maxsize=1)
        self._streams.add(told)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch())
        try:
            while True:
                yield await told.get()
        finally:
            self._streams.discard(told)

    async def _watch(self) -> None:
        """Until nobody follows."""
        last: Any = None
        while self._streams:
            try:
                state = await self._look()
            except Exception:
                log.exception("could not look for changes; goes on looking", extra={"action": "changes_error"})
            else:
                self._tell(changed=last is not None and state != last)
                last = state
            await asyncio.sleep(self._every_s)

    def _tell(self, *, changed: bool) -> None:
        for told in self._streams:
            missed = told.get_nowait() if told.full() else False
            told.put_nowait(changed or missed)
