"""Many callers, one transaction: what comes while a transaction is under way goes into the next one together.

Nobody waits for company: a lone caller begins at once. The answer comes after the commit, so what a caller was told is kept.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from sqlalchemy import exc

_AWAY = (OSError, TimeoutError, exc.TimeoutError, exc.OperationalError, exc.InterfaceError)

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Together(Generic[Item, Answer]):
    """Runs `work` on what callers hand in, at most `most` at a time and one time after the other.

    `work(items)` answers in order; an answer that is an exception is raised to that caller alone. If it raises itself and
    there were several items, each is tried alone: one that can't be done harms no other. Only where the database is away do
    all hear of it at once. Who goes away before its turn is left out; `lost` is told the answer to one that went away while
    it was served.
    """

    def __init__(
        self,
        work: Callable[[Sequence[Item]], Awaitable[Sequence[Answer | Exception]]],
        most: int,
        lost: Callable[[Item, Answer], None] = lambda item, answer: None,
    ) -> None:
        self._work = work
        self._most = most
        self._lost = lost
        self._waiting: deque[tuple[Item, asyncio.Future[Answer]]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def do(self, item: Item) -> Answer:
        """The answer to `item`."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._drain())
        return await heard(future, lambda answer: self._lost(item, answer))

    async def _drain(self) -> None:
        while self._waiting:
            taken = [self._waiting.popleft() for _ in range(min(self._most, len(self._waiting)))]
            batch = [each for each in taken if not each[1].done()]
            try:
                await self._serve(batch)
            finally:
                for _, future in batch:
                    if not future.done():  # only if this task is cancelled: the process ends
                        future.cancel()

    async def _serve(self, batch: Sequence[tuple[Item, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._work([item for item, _ in batch]) if batch else []
        except Exception as error:
            if len(batch) == 1 or isinstance(error, _AWAY):
                for _, future in batch:
                    _tell(future, error)
                return
            for each in batch:
                await self._serve([each])
            return
        for (item, future), answer in zip(batch, answers, strict=True):
            if future.done() and not isinstance(answer, Exception):
                self._lost(item, answer)
            _tell(future, answer)


async def heard(future: asyncio.Future[Answer], lost: Callable[[Answer], None]) -> Answer:
    """The answer; `lost` is told it if the caller was answered, and is cancelled before it hears."""
    try:
        return await future
    except asyncio.CancelledError:
        if future.done() and not future.cancelled() and future.exception() is None:
            lost(future.result())
        raise


def _tell(future: asyncio.Future[Answer], answer: Answer | Exception) -> None:
    if future.done():
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
