"""Which waiting samples the workers of one transaction get: oldest first, and for each worker those last that it gave up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator import dispatch
from coordinator.grouping import GroupMaker
from coordinator.scheduling import Scheduling
from coordinator.store import groups, leases
from coordinator.store.groups import LeasableSample

_LOADED_AT_ONCE = 64


class Waiting:
    """The waiting samples, as one transaction sees them and hands them out. New groups are made while there are too few."""

    def __init__(self, connection: AsyncConnection, maker: GroupMaker, scheduling: Scheduling, at: float) -> None:
        self._connection = connection
        self._maker = maker
        self._scheduling = scheduling
        self._at = at
        self._samples: dict[str, LeasableSample] = {}  # in order, those handed out left out
        self._loaded = 0
        self._exhausted = False
        self._held: dict[str, set[str]] = {}
        self._taken: set[str] = set()
        self._given: dict[str, Counter[str]] = {}  # by worker and group, in this transaction

    async def prepare(self, worker_ids: Sequence[str], total: int, *, shared: bool) -> None:
        """Load what these workers will take together. `shared`: they may not have all of a group, so that how many groups it
        takes is seen only later."""
        await self._load(total, worker_ids)
        missing = total - len(self._samples)
        if missing > 0 and not shared and not self._scheduling.draining:
            await self._make(-(-missing // self._scheduling.group_size))

    async def choose(self, worker_id: str, count: int, group_samples: int | None) -> list[LeasableSample]:
        """Take up to `count` for a worker that may have `group_samples` of each group (None: all).

        Where only this worker's share of the waiting groups is used up, it gets fewer, unless it would get none: others
        are there to take them, and every new group delays those that are open.
        """
        if group_samples is None and not self._held.get(worker_id) and len(self._samples) >= count:
            return self._take(worker_id, list(islice(self._samples.values(), count)))  # the usual case, at once
        used = await self._used(worker_id) if group_samples is not None else {}
        full = {group_id for group_id, n in used.items() if group_samples is not None and n >= group_samples}
        while True:
            held = self._held.get(worker_id, set())
            open_to_it = [each for each in self._samples.values() if each.group_id not in full]
            order = dispatch.order_for_worker([each.sample_id for each in open_to_it], held)
            chosen = dispatch.within_groups([self._samples[each] for each in order], used, group_samples)[:count]
            if not self._exhausted and (len(chosen) < count or any(each.sample_id in held for each in chosen)):
                await self._load(_LOADED_AT_ONCE, [worker_id])
                continue
            enough = len(open_to_it) >= count or bool(full)
            if len(chosen) >= count or (chosen and enough) or self._scheduling.draining:
                return self._take(worker_id, chosen)
            await self._make(1)

    def _take(self, worker_id: str, chosen: list[LeasableSample]) -> list[LeasableSample]:
        for sample in chosen:
            del self._samples[sample.sample_id]
            self._taken.add(sample.sample_id)
            self._given.setdefault(worker_id, Counter())[sample.group_id] += 1
        return chosen

    async def _used(self, worker_id: str) -> Counter[str]:
        return Counter(await groups.used_by_worker(self._connection, worker_id)) + self._given.get(worker_id, Counter())

    async def _load(self, count: int, worker_ids: Sequence[str]) -> None:
        found = await groups.waiting(self._connection, count, after=self._loaded)
        self._loaded += len(found)
        self._exhausted = len(found) < count
        # What runs out at this moment joins the samples before these, and shifts them: some come twice.
        self._samples |= {sample.sample_id: sample for sample in found if sample.sample_id not in self._taken}
        tried = [sample.sample_id for sample in self._samples.values() if sample.attempts]
        for worker_id, held in (await leases.held_before(self._connection, worker_ids, tried)).items():
            self._held[worker_id] = held

    async def _make(self, count: int) -> None:
        scheduling = self._scheduling
        deadline = self._at + scheduling.group_deadline_s
        made = await self._maker.make(self._connection, count, self._at, size=scheduling.group_size, deadline=deadline)
        self._samples |= {sample.sample_id: sample for sample in made}
