"""Which shard a server gives next to clients that swap the rest among themselves. Pure: time is an argument.

Each shard is given to one client, who passes it on; so a server sends about one copy of a version however many clients
it has. It is given again only to clients that still can't see it among their peers after `patience_s` (the taker was
slow, left, or keeps it for itself), or at once if the taker's connection broke.
"""

from __future__ import annotations

from shardcast import bits

PATIENCE_S = 5.0


class Handout:
    """What was given of one version."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._given: dict[int, list[float]] = {}  # shard → when it was given
        self._ever = 0

    def take(self, here: int, wanted: int, now: float) -> int | None:
        """A shard that is here and wanted, as bits: one that was never given, else the least given; None if none is due."""
        offer = here & wanted
        if fresh := offer & ~self._ever:
            return self._give(bits.lowest(fresh), now)
        due = [index for index in bits.indexes(offer) if self._given[index][-1] + self._patience_s <= now]
        if not due:
            return None
        return self._give(min(due, key=lambda index: (len(self._given[index]), self._given[index][-1])), now)

    def give_back(self, index: int) -> None:
        """The one who took it did not get it."""
        times = self._given.get(index)
        if times is None:
            return
        times.pop()
        if not times:
            del self._given[index]
            self._ever &= ~(1 << index)

    def next_due(self, here: int, wanted: int, now: float) -> float | None:
        """Seconds until a shard that was given already may be given again; None if none is here and wanted."""
        waits = [self._given[index][-1] + self._patience_s - now for index in bits.indexes(here & wanted & self._ever)]
        return max(0.0, min(waits)) if waits else None

    def _give(self, index: int, now: float) -> int:
        self._given.setdefault(index, []).append(now)
        self._ever |= 1 << index
        return index
