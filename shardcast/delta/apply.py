"""Fills a version that is on its way in from what a delta makes of its base, each shard against its digest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from protocol.errors import RollswarmError
from shardcast.delta.blob import Section
from shardcast.delta.errors import BaseUnreadable, InvalidDelta, NotHereYetError
from shardcast.delta.frames import Bytes
from shardcast.delta.views import View
from shardcast.partial import PartialVersion


class SectionedView(View, Protocol):
    """A view that says what is best read in one go, as `DeltaView` does."""

    @property
    def sections(self) -> Sequence[Section]: ...


@dataclass(frozen=True, slots=True)
class Applied:
    """How many of the missing shards came out right; and of the others, one's fault, if any raised one."""

    right: int
    wrong: int
    fault: RollswarmError | None


class Applier:
    """One use: `run` in a thread, or `make` for each section, in any; `stop` from anywhere.

    `on_shard(index)` is called in the thread that made the shard.
    """

    def __init__(
        self,
        partial: PartialVersion,
        view: SectionedView,
        *,
        threads: int = 1,
        on_shard: Callable[[int], None] | None = None,
    ) -> None:
        self._partial = partial
        self._view = view
        self._threads = threads
        self._on_shard = on_shard
        self._local = threading.local()
        self._stopped = threading.Event()
        self._missing = len(partial.missing)

    def stop(self) -> None:
        """End after the shards that are being made."""
        self._stopped.set()

    def run(self) -> Applied:
        """Make every shard that is missing. Blocking. A shard that comes out wrong stays missing, others are kept.

        Raises DiskFullError, OSError of the target's disk; what is right is kept then too.
        """
        work = [self._view.sections[section] for section in self.due]
        with ThreadPoolExecutor(self._threads, thread_name_prefix="delta") as pool:
            faults = list(pool.map(self.make, work))
        return self.outcome(next(filter(None, faults), None))

    @property
    def due(self) -> list[int]:
        """The sections that make a shard which is missing."""
        missing = set(self._partial.missing)
        return [
            number for number, section in enumerate(self._view.sections) if not missing.isdisjoint(_shards_of(section))
        ]

    def outcome(self, fault: RollswarmError | None) -> Applied:
        """What came of it."""
        wrong = len(self._partial.missing)
        return Applied(self._missing - wrong, wrong, fault)

    def make(self, section: Section) -> RollswarmError | None:
        """Make a section's shards and keep those that are right; the fault, if its bytes could not be had. Blocking.

        Raises as `run` does; what still waits its turn ends at once then.
        """
        try:
            return None if self._stopped.is_set() else self._make(section)
        except BaseException:
            self._stopped.set()
            raise

    def _make(self, section: Section) -> RollswarmError | None:
        out = self._buffer(section.size)
        try:
            self._view.read(section.file, section.offset, out)
        except (InvalidDelta, BaseUnreadable, NotHereYetError) as fault:
            return fault
        for index in _shards_of(section):
            shard = self._partial.manifest.shards[index]
            begin = shard.offset - section.offset
            if index not in self._partial.have and not self._stopped.is_set():
                self._write(index, out[begin : begin + shard.size])
        return None

    def _write(self, index: int, data: Bytes) -> None:
        with self._partial.writer(index) as writer:
            writer.write([data.data])
            right = self._partial.commit(index, writer.digest)
        if right and self._on_shard:
            self._on_shard(index)

    def _buffer(self, size: int) -> Bytes:
        """One for each thread: allocating is dearer than making a section."""
        held: Bytes | None = getattr(self._local, "buffer", None)
        if held is None or len(held) < size:
            held = self._local.buffer = np.empty(size, np.uint8)
        return held[:size]


def _shards_of(section: Section) -> range:
    return range(section.first, section.stop)
