"""Workers that wait for leases: one question to the database answers all of them, however many they are.

Who comes is served with those who come at the same time. Who got nothing stands in line, in the order of arrival, and the
line looks again a few times a second, by one cheap read while nothing can be had. What is waited for (verdicts, steps,
versions, other replicas' leases) is written by other processes, so the database is asked rather than an event awaited.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

from coordinator.granting import Granted, Request
from coordinator.leasing import Leasing
from coordinator.together import heard

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25
_AT_ONCE = 64


@dataclass(eq=False)
class _Waiter:
    request: Request
    deadline: float  # monotonic
    answer: Granted
    future: asyncio.Future[Granted]


class Line:
    """Stands between calls that wait and `leasing`. It costs nothing while nobody waits."""

    def __init__(self, leasing: Leasing) -> None:
        self._leasing = leasing
        self._waiters: list[_Waiter] = []
        self._task: asyncio.Task[None] | None = None

    async def acquire(self, worker_id: str, wanted: int, wait_s: float) -> Granted:
        """Leases, or after `wait_s` the reason why there are none. Raises WorkerFault for who is banned or unknown.

        A caller that goes away while leases are granted to it gives them back.
        """
        deadline = time.monotonic() + wait_s
        granted = await self._leasing.acquire(worker_id, wanted)
        if granted.leases or time.monotonic() >= deadline:
            return granted
        for other in [each for each in self._waiters if each.request.worker_id == worker_id]:
            self._answer(other, other.answer)  # one place in line for each worker, however often it asks
        waiter = _Waiter(Request(worker_id, wanted), deadline, granted, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve())
        try:
            return await heard(waiter.future, lambda answer: self._leasing.abandon(waiter.request, answer))
        finally:
            with contextlib.suppress(ValueError):
                self._waiters.remove(waiter)

    async def _serve(self) -> None:
        """Until the line is empty."""
        while self._waiters:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                if self._waiters and await self._leasing.has_room():
                    await self._look()
            except Exception:
                log.exception("the line could not look; it goes on", extra={"action": "line_error"})
            now = time.monotonic()
            for waiter in [each for each in self._waiters if now >= each.deadline]:
                self._answer(waiter, waiter.answer)

    async def _look(self) -> None:
        """Ask for the first in line, and go on while somebody gets something: what one look costs is bounded, however long
        the line is. Whom it is not the capacity that holds back goes to the end of the line, behind those not asked yet."""
        granted = True
        while granted and self._waiters:
            asked = self._waiters[:_AT_ONCE]
            answers = await self._leasing.acquire_many([each.request for each in asked])
            granted = False
            for waiter, answer in zip(asked, answers, strict=True):
                if isinstance(answer, Exception) or answer.leases:
                    granted = True
                    self._answer(waiter, answer)
                    continue
                waiter.answer = answer
                if answer.reason != "capacity" and waiter in self._waiters:
                    self._waiters.remove(waiter)
                    self._waiters.append(waiter)

    def _answer(self, waiter: _Waiter, answer: Granted | Exception) -> None:
        with contextlib.suppress(ValueError):
            self._waiters.remove(waiter)
        if isinstance(answer, Exception):
            if not waiter.future.done():
                waiter.future.set_exception(answer)
        elif waiter.future.done():
            self._leasing.abandon(waiter.request, answer)
        else:
            waiter.future.set_result(answer)
