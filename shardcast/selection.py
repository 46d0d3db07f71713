"""Which shard is asked from which source next. Pure: time and randomness are arguments.

A source is asked only for what it is known to have. Among the shards that it has, those that no other known source
has go first, at a random place, so that clients of the same sources bring different shards into the network.
`spared` sources (a relay's origin) are not asked for what a sibling has or is getting, so that the origin sends each
shard about once however many relays there are; unless the siblings are too slow (`siblings_lag`) or gone. A relay that
is busy, its uplink full, leaves the slices of its siblings to them, so that what each has to pass on stays even.
When nothing is left to ask, a straggler may be asked from a second source (`choose_hedge`).
"""

from __future__ import annotations

import functools
import math
import operator
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardcast import bits, routing
from shardcast.routing import SourceStats

HEDGE_AFTER_S = 1.0  # younger requests are never hedged
HEDGE_FACTOR = 2.0  # the second source must promise to be so many times faster than the first's rest
HEDGE_UNKNOWN_S = 4.0  # where no source's speed is known, a request is a straggler after this
LAG_GRACE_S = 3.0  # no judgement of siblings before they had this long


@dataclass(frozen=True, slots=True)
class View:
    """One source at the moment of a choice: shards it has, and shards on their way to it, as bits.

    `asked`: requests of this download in flight there, of which there may be `most` at once (the source's own count also
    has those of other versions, which must not keep a newer one waiting).
    """

    stats: SourceStats
    have: int
    coming: int = 0
    spared: bool = False
    asked: int = 0
    most: int = 4

    @property
    def full(self) -> bool:
        """It has as many requests in flight as it should."""
        return self.asked >= self.most

    @property
    def alive(self) -> bool:
        """Its word counts: it was never banned, and its last request didn't fail."""
        return self.stats.failures_in_row == 0 and self.stats.bans == 0


@dataclass(frozen=True, slots=True)
class Wish:
    """What a download wants: shards nobody is fetching, of which `urgent` go first; `own` is this relay's slice.

    Of the spared it asks for its slice alone (`only_own`), and, if not `spare`, for what siblings have as well.
    """

    missing: int
    urgent: int = 0
    own: int = 0
    only_own: bool = False
    spare: bool = True


@dataclass(frozen=True, slots=True)
class Pick:
    """Ask `source` for shard `index`."""

    source: str
    index: int


@dataclass(frozen=True, slots=True)
class Flight:
    """A request that is under way: bytes received of `size` since it began `elapsed` seconds ago."""

    source: str
    index: int
    size: int
    received: int
    elapsed: float


def choose(views: Mapping[str, View], wish: Wish, now: float, rng: random.Random, *, explore: float) -> Pick | None:
    """The next request, or None if there is nothing to ask now."""
    elsewhere = _union(view.have | view.coming for view in views.values() if not view.spared and view.alive)
    offers: dict[str, int] = {}
    for name, view in views.items():
        offer = wish.missing & view.have
        if view.spared and wish.spare:
            offer &= ~elsewhere & (wish.own if wish.only_own else -1)
        if offer and not view.full:
            offers[name] = offer
    chosen = routing.choose({each: views[each].stats for each in offers}, now, rng, explore)
    if chosen is None:
        return None
    others = _union(view.have for other, view in views.items() if other != chosen)
    return Pick(chosen, _choose_index(offers[chosen], others, wish, views[chosen].spared, rng))


def choose_hedge(views: Mapping[str, View], wish: Wish, flights: Sequence[Flight], now: float) -> Pick | None:
    """A second source for the worst straggler, or None if none is worth the bytes."""
    best: tuple[float, Pick] | None = None
    for flight in flights:
        if flight.elapsed < HEDGE_AFTER_S:
            continue
        rest = _rest_s(flight)
        for name, view in views.items():
            if name == flight.source or not view.stats.is_ready(now) or view.full:
                continue
            if view.spared and wish.spare:
                continue
            if not bits.has(view.have, flight.index) or not _worth(flight, rest, view.stats):
                continue
            if best is None or rest > best[0]:
                best = (rest, Pick(name, flight.index))
    return None if best is None else best[1]


def siblings_lag(backlog_bytes: int, bytes_per_s: float, since_s: float, patience_s: float) -> bool:
    """Whether what the siblings have, and this relay has not, would take longer than `patience_s` at their rate."""
    if since_s < LAG_GRACE_S or not backlog_bytes:
        return False
    return backlog_bytes > bytes_per_s * patience_s


def slice_of(ids: Collection[str], own: str, count: int) -> int:
    """The part of a version's shards, as bits, that the relay `own` takes first: equal slices in the order of ids.

    >>> [list(bits.indexes(slice_of({"b", "a"}, each, 5))) for each in ("a", "b")]
    [[0, 1], [2, 3, 4]]
    """
    ranked = sorted({*ids, own})
    rank = ranked.index(own)
    return bits.span(rank * count // len(ranked), (rank + 1) * count // len(ranked))


def _choose_index(offer: int, others: int, wish: Wish, spared: bool, rng: random.Random) -> int:
    if offer & wish.urgent:
        return bits.lowest(offer & wish.urgent)
    if spared and offer & wish.own:
        return bits.lowest(offer & wish.own)
    if not spared and offer & ~others:
        offer &= ~others
    return bits.from_on(offer, rng.randrange(offer.bit_length()))


def _rest_s(flight: Flight) -> float:
    if not flight.received:
        return math.inf
    return (flight.size - flight.received) * flight.elapsed / flight.received


def _worth(flight: Flight, rest: float, other: SourceStats) -> bool:
    if other.throughput is None:
        return flight.elapsed > HEDGE_UNKNOWN_S and rest > HEDGE_UNKNOWN_S
    promised = flight.size / other.throughput
    if math.isinf(rest):  # not one byte yet: judged by its age
        return flight.elapsed > HEDGE_FACTOR * promised + HEDGE_AFTER_S
    return rest > HEDGE_FACTOR * promised + HEDGE_AFTER_S / 2


def _union(parts: Iterable[int]) -> int:
    return functools.reduce(operator.or_, parts, 0)
