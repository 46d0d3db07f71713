"""One version on its way into a relay, and everyone who waits for its shards."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack

from protocol.manifest import Digest, envelope_to_json
from shardcast.client import ShardcastClient
from shardcast.download import Download
from shardcast.have import MAX_ADDED, MAX_COMING, Have
from shardcast.partial import PartialVersion
from shardcast.pulse import Pulse
from shardcast.sources import NotYet
from shardcast.storage import ShardLocation, StoredVersion, VersionStore


class Incoming:
    """Shards are offered as soon as they are verified; `arrived` lists them in that order."""

    def __init__(
        self, store: VersionStore, partial: PartialVersion, client: ShardcastClient, locked: AsyncExitStack
    ) -> None:
        self.partial = partial
        self.envelope_json = envelope_to_json(partial.envelope)
        self.epoch = secrets.token_hex(8)
        self.arrived: list[int] = sorted(partial.have)
        self.closed = False
        self._locked = locked  # holds the store's lock, so that nobody collects what is being filled
        self._store = store
        self._shards = partial.manifest.shards
        self._where = {shard.digest: index for index, shard in enumerate(self._shards)}
        self._where.update({self._shards[index].digest: index for index in self.arrived})
        self._pulse = Pulse()
        self._download: Download = client.download(partial, on_shard=self._on_shard)
        self.task: asyncio.Task[StoredVersion] | None = None  # set by who runs it

    @property
    def version(self) -> int:
        return self.partial.manifest.policy_version

    @property
    def total(self) -> Digest:
        """The digest that stands for the version's content."""
        return self.partial.manifest.total_digest

    async def run(self) -> StoredVersion:
        """Fill the version and make it visible. Raises SourceFault, DiskFullError, VersionConflict."""
        await self._download.run()
        return await asyncio.to_thread(self._store.finish, self.partial)

    def names(self, digest: Digest) -> bool:
        """Whether the shard belongs to this version."""
        return digest in self._where

    async def wait_shard(self, digest: Digest, wait_s: float) -> ShardLocation:
        """Where the shard lies once it is verified. Raises NotYet after `wait_s`."""
        if self._where[digest] not in self.partial.have:
            self._download.demand(self._where[digest])
            await self._pulse.wait_until(lambda: self.closed or self._where[digest] in self.partial.have, wait_s)
            if self._where[digest] not in self.partial.have:
                raise NotYet("the shard is on its way")
        index = self._where[digest]
        shard = self._shards[index]
        return ShardLocation(self.version, self.partial.path_of(index), shard.offset, shard.size)

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
        coming = tuple(self._download.coming[:MAX_COMING])
        return Have(role, server_id, False, self.epoch, start, added, coming)

    async def close(self) -> None:
        """Free the lock and everyone who waits."""
        self.closed = True
        self.partial.close()
        await self._locked.aclose()
        self._pulse.beat()

    def _on_shard(self, index: int) -> None:
        self._where[self._shards[index].digest] = index
        self.arrived.append(index)
        self._pulse.beat()
