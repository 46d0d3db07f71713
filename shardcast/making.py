"""Makes a version's shards out of a blob while that is still coming.

Loops: each worker takes the next section whose bytes are here and makes it in a thread. A section that copies another (a
tied tensor) which is not here yet is put off until the blob is whole. So when the last byte comes, only what hangs on it
is left to do.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from protocol.errors import RollswarmError
from shardcast.blob_in import BlobIn
from shardcast.delta.apply import Applied, Applier
from shardcast.delta.decode import DeltaView
from shardcast.delta.errors import NotHereYetError
from shardcast.pulse import Pulse
from shardcast.transfer import in_thread


class Making:
    """One use. `blob` is the one that `view` reads; the others that it may be stacked on are whole."""

    def __init__(self, applier: Applier, view: DeltaView, blob: BlobIn) -> None:
        self._applier = applier
        self._sections = view.sections
        self._blob = blob
        self._due = applier.due
        places = [blob.shards_at(*view.place(section)) for section in self._due]
        self._waiting = Waiting(places, blob.partial.have)
        self._ready = deque(self._waiting.free)
        self._later: deque[int] = deque()
        self._left = len(self._due)
        self._fault: RollswarmError | None = None
        self._pulse = Pulse()
        blob.watch(self._arrived)

    async def run(self, workers: int) -> Applied:
        """Return when every section was made, or tried. Raises DiskFullError, OSError of the target's disk."""
        with ThreadPoolExecutor(workers, thread_name_prefix="delta") as pool:  # its threads keep their buffers
            tasks = [asyncio.create_task(self._work(pool)) for _ in range(workers)]
            try:
                await asyncio.gather(*tasks)
            finally:
                self._applier.stop()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return self._applier.outcome(self._fault)

    async def _work(self, pool: Executor) -> None:
        while self._left:
            if not self._ready and self._blob.whole:
                self._ready, self._later = self._later, self._ready
            if not self._ready:
                await self._pulse.wait()
                continue
            number = self._ready.popleft()
            fault = await in_thread(self._applier.make, self._sections[self._due[number]], pool=pool)
            if isinstance(fault, NotHereYetError):
                self._later.append(number)
                continue
            self._left -= 1
            self._fault = self._fault or fault
            if not self._left:
                self._pulse.beat()

    def _arrived(self, shard: int) -> None:
        self._ready.extend(self._waiting.arrived(shard))
        self._pulse.beat()


class Waiting:
    """Which of several things have all their shards. `places`: the shards that each needs, at least one."""

    def __init__(self, places: Sequence[range], have: Iterable[int]) -> None:
        here = set(have)
        self._lacking: Counter[int] = Counter()
        self._by_shard: dict[int, list[int]] = {}
        self.free: list[int] = []
        for number, needed in enumerate(places):
            absent = [shard for shard in needed if shard not in here]
            for shard in absent:
                self._by_shard.setdefault(shard, []).append(number)
            self._lacking[number] = len(absent)
            if not absent:
                self.free.append(number)

    def arrived(self, shard: int) -> list[int]:
        """What needed nothing more than this shard. A shard arrives once."""
        freed = []
        for number in self._by_shard.pop(shard, ()):
            self._lacking[number] -= 1
            if not self._lacking[number]:
                freed.append(number)
        return freed
