"""What `coordinator serve` does by itself: frees leases, looks at the knobs, forgets payloads, counts what is over, watches its
certificate.

Each loop runs until `stop` is set; what fails is logged, and tried again the next time.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import logging
from collections.abc import Callable

from coordinator import knobs
from coordinator.config import StorageSection
from coordinator.leasing import Leasing
from coordinator.scheduling import Scheduling
from coordinator.store import database, retention, tallies
from coordinator.store import knobs as knob_store
from coordinator.store.database import Database, Lane
from coordinator.tls import ServerTls

log = logging.getLogger(__name__)

_SWEEP_S = 1.0
_CERTIFICATE_EVERY_S = 5.0
_FORGET_EVERY_S = 60.0
_FORGET_AT_ONCE = 1000
_COUNT_EVERY_S = 10.0
_COUNT_AT_ONCE = 5000
_DAY_S = 86_400


class Live:
    """The scheduling as operators have it now; `use` is told of every change."""

    def __init__(self, db: Database, configured: Scheduling, use: Callable[[Scheduling], None]) -> None:
        self._db = db
        self._configured = configured
        self._use = use
        self.scheduling = configured

    async def refresh(self) -> None:
        async with self._db.read() as connection:
            turned = await knob_store.read(connection)
        scheduling = knobs.scheduling(self._configured, turned)
        if scheduling != self.scheduling:
            self.scheduling = scheduling
            self._use(scheduling)


async def sweep(leasing: Leasing, live: Live, stop: asyncio.Event) -> None:
    """Free overdue leases and look at the knobs every second, also while no worker asks, until `stop` is set."""
    while not stop.is_set():
        try:
            await live.refresh()
            expired = await leasing.expire()
            if expired:
                log.info("%d leases expired", expired, extra={"action": "expire"})
        except Exception:
            log.exception("the sweep failed; it goes on", extra={"action": "sweep_error"})
        try:
            await asyncio.wait_for(stop.wait(), _SWEEP_S)
        except TimeoutError:
            continue


async def watch_certificate(tls: ServerTls | None, stop: asyncio.Event) -> None:
    """Take up renewed files, and warn once a day while expiry is near, until `stop` is set."""
    warned = 0
    while tls is not None and not stop.is_set():
        now = dt.datetime.now(dt.UTC)
        await asyncio.to_thread(tls.refresh, now)
        warning = tls.warning(now)
        if warning and warned != now.toordinal():
            warned = now.toordinal()
            log.warning("%s", warning, extra={"action": "certificate"})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _CERTIFICATE_EVERY_S)


async def forget_payloads(db: Database, storage: StorageSection, stop: asyncio.Event) -> None:
    """Forget payloads whose time is over, a few at a time so that nobody waits, until `stop` is set."""
    while not stop.is_set():
        pause = _FORGET_EVERY_S
        try:
            async with db.write(Lane.ROWS) as connection:
                at = await database.now(connection)
                forgotten = await retention.forget(
                    connection,
                    trained_before=at - storage.trained_days * _DAY_S,
                    others_before=at - storage.rejected_days * _DAY_S,
                    limit=_FORGET_AT_ONCE,
                )
            if forgotten.more:
                pause = _SWEEP_S
            if forgotten.payloads:
                log.info("%d payloads forgotten", forgotten.payloads, extra={"action": "retention"})
        except Exception:
            log.exception("retention failed; it goes on", extra={"action": "sweep_error"})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), pause)


async def count_what_is_over(db: Database, stop: asyncio.Event) -> None:
    """Count what has become final, a part at a time so that nobody waits, until `stop` is set."""
    while not stop.is_set():
        pause = _COUNT_EVERY_S
        try:
            for tally in tallies.ALL:
                async with db.write(Lane.ROWS) as connection:
                    at = await database.now(connection)
                    if await tallies.advance(connection, tally, at, _COUNT_AT_ONCE):
                        pause = _SWEEP_S
        except Exception:
            log.exception("counting failed; it goes on", extra={"action": "sweep_error"})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), pause)
