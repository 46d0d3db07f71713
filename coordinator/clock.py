"""The database's clock without a question to the database each time: for tokens, whose lives are minutes.

Leases go by the clock that their own transaction reads.
"""

from __future__ import annotations

import asyncio
import time

from coordinator.store import database
from coordinator.store.database import Database

_ASKED_EVERY_S = 5.0


class DatabaseClock:
    """Unix time by the database's clock, which is asked every few seconds; between, and while it is away, our own goes on."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._ahead: float | None = None  # of our monotonic clock
        self._asked = 0.0
        self._asking = asyncio.Lock()

    async def now(self) -> float:
        """Raises the database's error only if it never answered."""
        if self._ahead is None:
            async with self._asking:
                if self._ahead is None:
                    await self._ask()
        elif time.monotonic() - self._asked > _ASKED_EVERY_S and not self._asking.locked():
            async with self._asking:
                try:
                    await self._ask()
                except Exception:
                    self._asked = time.monotonic()
        assert self._ahead is not None
        return time.monotonic() + self._ahead

    async def _ask(self) -> None:
        async with self._db.read() as connection:
            self._ahead = await database.now(connection) - time.monotonic()
        self._asked = time.monotonic()
