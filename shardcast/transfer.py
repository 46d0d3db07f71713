"""One shard on its way: what was received, from whom, and who is to blame if it is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shardcast.partial import ShardWriter
from shardcast.sources import Misbehaved, Source, Unavailable

T = TypeVar("T")


@dataclass(slots=True)
class Transfer:
    """Survives cut connections: the next source goes on where the last one stopped.

    If bytes from two sources make a wrong shard, neither is proven guilty: from then on it comes from one `alone`.
    """

    index: int
    writer: ShardWriter
    contributors: set[str] = field(default_factory=set)
    alone: bool = False

    def begin(self, source: Source) -> None:
        """A source is about to send the rest."""
        if self.alone:
            self.writer.restart()
        if self.writer.received == 0:
            self.contributors.clear()
        self.contributors.add(source.url)

    def blame(self, source: Source) -> Misbehaved | Unavailable:
        """All bytes came and are wrong: start again, and say what is held against the source that sent the last."""
        count = len(self.contributors)
        self.writer.restart()
        if count == 1:
            return Misbehaved(f"{source.url}: served wrong bytes for shard {self.index}")
        self.alone = True
        return Unavailable(f"{source.url}: a shard pieced together from {count} sources was wrong")


@dataclass(slots=True, eq=False)
class Flight:
    """A request under way for a transfer, and perhaps a second one (`hedge`) that races it into a scratch file."""

    source: Source
    transfer: Transfer
    begun: float
    at_start: int  # bytes that were there when it began
    task: asyncio.Task[bool] | None = None
    hedge: asyncio.Task[bool] | None = None
    race_over: asyncio.Event = field(default_factory=asyncio.Event)  # set by who began the hedge
    settled: bool = False  # the shard is verified, or about to be, by the one that came first

    @property
    def received(self) -> int:
        """Bytes that this request brought."""
        return self.transfer.writer.received - self.at_start


async def in_thread(function: Callable[..., T], *arguments: Any, pool: Executor | None = None) -> T:
    """Run blocking work that must not be left behind: a cancellation waits for its end."""
    running = asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


async def ended(task: asyncio.Task[T]) -> T | None:
    """The result of a task, or None if it was cancelled by another. Cancelling the waiter cancels the task."""
    try:
        await asyncio.wait({task})
    finally:
        await stop(task)
    return None if task.cancelled() else task.result()


async def stop(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task and wait until it has really ended."""
    if task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task})
