"""Shards on their way into a relay, and everyone who waits for them: a version's files, or the delta that makes it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from protocol.manifest import Digest
from shardcast.have import MAX_ADDED, MAX_COMING, Have
from shardcast.partial import PartialVersion
from shardcast.pulse import Pulse
from shardcast.sources import NotYet
from shardcast.storage import ShardLocation


class Parcel:
    """Shards are offered as soon as they are verified; `arrived` lists them in that order.

    `demand(index)`: asks for a shard before the others. `coming()`: the shards that are being sent now.
    """

    def __init__(
        self,
        partial: PartialVersion,
        demand: Callable[[int], None] = lambda index: None,
        coming: Callable[[], Sequence[int]] = lambda: (),
    ) -> None:
        self.partial = partial
        self.epoch = secrets.token_hex(8)
        self.arrived: list[int] = sorted(partial.have)
        self.closed = False
        self._demand = demand
        self._coming = coming
        self._shards = partial.manifest.shards
        self._where = {shard.digest: index for index, shard in enumerate(self._shards)}
        self._where.update({self._shards[index].digest: index for index in self.arrived})
        self._pulse = Pulse()

    @property
    def total(self) -> Digest:
        """The digest that stands for the content."""
        return self.partial.manifest.total_digest

    def names(self, digest: Digest) -> bool:
        """Whether the shard belongs to it."""
        return digest in self._where

    def has(self, digest: Digest) -> bool:
        """Whether the shard is here."""
        return self._where.get(digest, -1) in self.partial.have

    async def wait_shard(self, digest: Digest, wait_s: float) -> ShardLocation:
        """Where the shard lies once it is verified. Raises NotYet after `wait_s`."""
        if self._where[digest] not in self.partial.have:
            self._demand(self._where[digest])
            await self._pulse.wait_until(lambda: self.closed or self._where[digest] in self.partial.have, wait_s)
            if self._where[digest] not in self.partial.have:
                raise NotYet("the shard is on its way")
        index = self._where[digest]
        shard = self._shards[index]
        version = self.partial.manifest.policy_version
        return ShardLocation(version, self.partial.path_of(index), shard.offset, shard.size)

    async def wait_news(self, epoch: str, after: int, wait_s: float) -> None:
        """Return when there is more than the asker knows, or this is over, or `wait_s` passed."""
        if epoch == self.epoch:
            await self._pulse.wait_until(lambda: self.closed or len(self.arrived) != after, wait_s)

    def have(self, role: str, server_id: str, epoch: str, after: int) -> Have | None:
        """What the asker doesn't know yet; None if there is nothing."""
        known = epoch == self.epoch and after <= len(self.arrived)
        if known and after == len(self.arrived):
            return None
        start = after if known else 0
        added = tuple(self.arrived[start : start + MAX_ADDED])
        coming = tuple(self._coming()[:MAX_COMING])
        return Have(role, server_id, False, self.epoch, start, added, coming)

    def close(self) -> None:
        """Free everyone who waits."""
        self.closed = True
        self._pulse.beat()

    def on_shard(self, index: int) -> None:
        """A shard was verified."""
        self._where[self._shards[index].digest] = index
        self.arrived.append(index)
        self._pulse.beat()
