"""Which shard a server gives next to clients that swap the rest among themselves. Pure: time is an argument.

Each shard is given to one client, who passes it on; so a server sends about one copy of a version however many clients
it has. `patience_s` later it is free for another client that still can't see it among its peers: the taker was slow, left,
can't be reached, or keeps it for itself. From then on twice as many may have been given it every `DOUBLING_S`: where peers
are of no use to each other nobody waits long, and where one taker is slow, the crowd doesn't take up the uplink for it. If
the taker's connection broke, it is as if it had never been given.
"""

from __future__ import annotations

from shardcast import bits

PATIENCE_S = 5.0
DOUBLING_S = 2.0


class Handout:
    """What was given of one version."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._first: dict[int, float] = {}  # shard → when it was given first
        self._times: dict[int, int] = {}
        self._last: dict[int, tuple[str, float]] = {}  # shard → who was given it last, and when
        self._given = 0

    def take(self, asker: str, here: int, wanted: int, now: float) -> int | None:
        """A shard that is here and wanted, as bits: one never given, else the least given that is free; None if none.

        `asker`: what a client calls itself. One who asks several times at once gets no shard twice.
        """
        offer = here & wanted
        if fresh := offer & ~self._given:
            return self._give(asker, bits.lowest(fresh), now)
        free = [index for index in bits.indexes(offer) if self._is_free(asker, index, now)]
        return self._give(asker, min(free, key=lambda index: self._times[index]), now) if free else None

    def give_back(self, index: int) -> None:
        """The one who took it did not get it."""
        self._times[index] -= 1
        if not self._times[index]:
            del self._times[index], self._first[index], self._last[index]
            self._given &= ~(1 << index)

    def next_free(self, here: int, wanted: int, now: float) -> float | None:
        """Seconds until a shard that was given becomes free; None if none is here and wanted."""
        waits = [self._free_at(index) - now for index in bits.indexes(here & wanted & self._given)]
        return max(0.0, min(waits)) if waits else None

    def _free_at(self, index: int) -> float:
        return self._first[index] + self._patience_s + DOUBLING_S * (self._times[index].bit_length() - 1)

    def _is_free(self, asker: str, index: int, now: float) -> bool:
        last, at = self._last[index]
        return self._free_at(index) <= now and (last != asker or at + self._patience_s <= now)

    def _give(self, asker: str, index: int, now: float) -> int:
        self._first.setdefault(index, now)
        self._last[index] = (asker, now)
        self._times[index] = self._times.get(index, 0) + 1
        self._given |= 1 << index
        return index
