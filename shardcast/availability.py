"""What each source is known to have of one version, from its `have` answers. A hint: only digests prove anything."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardcast import bits
from shardcast.have import Have

RETRACT_S = 2.0  # a shard that a source turned out not to have isn't asked from it again within this
CLAIM_S = 10.0  # a shard that a sibling says is coming to it, and doesn't come within this, counts as nobody's


@dataclass(slots=True)
class Holding:
    """One source's shards as bits. `assumed`: it can't say what it has, so it is asked for everything and may wait."""

    have: int = 0
    epoch: str = ""
    next: int = 0
    complete: bool = False
    assumed: bool = False
    role: str = ""
    server_id: str = ""
    news_at: float = 0.0  # when it last had more than before
    coming: dict[int, float] = field(default_factory=dict)  # shard → when that was first said
    retracted: dict[int, float] = field(default_factory=dict)  # shard → when it turned out to be absent

    def known(self, now: float) -> int:
        """The shards that the source may be asked for."""
        if not self.retracted:
            return self.have
        self.retracted = {index: at for index, at in self.retracted.items() if now - at < RETRACT_S}
        return self.have & ~bits.of(self.retracted)

    def claims(self, now: float) -> int:
        """The shards that are on their way to the source, as far as that is still credible."""
        return bits.of(index for index, since in self.coming.items() if now - since < CLAIM_S)


class Availability:
    """Used from one event loop. `count` is the number of shards of the version."""

    def __init__(self, count: int) -> None:
        self.full = bits.full(count)
        self._holdings: dict[str, Holding] = {}

    def of(self, url: str) -> Holding:
        """What is known of a source; nothing, as long as it hasn't answered."""
        return self._holdings.setdefault(url, Holding())

    def update(self, url: str, have: Have, now: float) -> None:
        """Take in an answer. One that doesn't continue what is known begins anew."""
        holding = self.of(url)
        holding.role, holding.server_id = have.role, have.server_id
        if have.complete or have.added:
            holding.news_at = now
        if have.complete:
            holding.have, holding.complete, holding.coming = self.full, True, {}
            return
        if have.epoch != holding.epoch or have.after != holding.next:
            holding.have = 0
        holding.epoch, holding.next = have.epoch, have.next
        holding.have |= bits.of(have.added)
        holding.coming = {index: holding.coming.get(index, now) for index in have.coming}

    def assume(self, url: str) -> None:
        """The source can't say what it has."""
        holding = self.of(url)
        holding.have, holding.assumed = self.full, True

    def forget(self, url: str) -> None:
        """The source can't be reached: nothing is known of it, and its claims bind nobody."""
        holding = self.of(url)
        self._holdings[url] = Holding(role=holding.role, server_id=holding.server_id)

    def retract(self, url: str, index: int, now: float) -> None:
        """The source doesn't have this shard after all, or not any more, or not at this moment."""
        self.of(url).retracted[index] = now
