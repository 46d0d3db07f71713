"""Fills a version that is on its way in from what a delta makes of its base, shard by shard, each against its digest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from protocol.errors import RollswarmError
from shardcast.delta.errors import BaseUnreadable, InvalidDelta
from shardcast.delta.frames import Bytes
from shardcast.delta.views import View
from shardcast.partial import PartialVersion


@dataclass(frozen=True, slots=True)
class Applied:
    """How many of the missing shards came out right; and of the others, one's fault, if any raised one."""

    right: int
    wrong: int
    fault: RollswarmError | None


class Applier:
    """One use: `run` in a thread, `stop` from anywhere. `on_shard(index)` is called in the thread that made the shard."""

    def __init__(
        self, partial: PartialVersion, view: View, *, threads: int = 1, on_shard: Callable[[int], None] | None = None
    ) -> None:
        self._partial = partial
        self._view = view
        self._threads = threads
        self._on_shard = on_shard
        self._local = threading.local()
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End after the shards that are being made."""
        self._stopped.set()

    def run(self) -> Applied:
        """Make every shard that is missing. Blocking. A shard that comes out wrong stays missing, others are kept.

        Raises DiskFullError, OSError of the target's disk; what is right is kept then too.
        """
        missing = self._partial.missing
        with ThreadPoolExecutor(self._threads, thread_name_prefix="delta") as pool:
            outcomes = list(pool.map(self._make_or_stop, missing))
        faults = [outcome for outcome in outcomes if isinstance(outcome, RollswarmError)]
        right = sum(1 for outcome in outcomes if outcome is True)
        return Applied(right, len(missing) - right, faults[0] if faults else None)

    def _make_or_stop(self, index: int) -> bool | RollswarmError:
        """What still waits in the pool ends at once when the disk fails."""
        try:
            return False if self._stopped.is_set() else self._make(index)
        except BaseException:
            self._stopped.set()
            raise

    def _make(self, index: int) -> bool | RollswarmError:
        shard = self._partial.manifest.shards[index]
        out = self._buffer(shard.size)
        try:
            self._view.read(shard.file, shard.offset, out)
        except (InvalidDelta, BaseUnreadable) as fault:
            return fault
        with self._partial.writer(index) as writer:
            writer.write([out.data])
            right = self._partial.commit(index, writer.digest)
        if right and self._on_shard:
            self._on_shard(index)
        return right

    def _buffer(self, size: int) -> Bytes:
        """One for each thread: allocating is dearer than making a shard."""
        held: Bytes | None = getattr(self._local, "buffer", None)
        if held is None or len(held) < size:
            held = self._local.buffer = np.empty(size, np.uint8)
        return held[:size]
