"""One version on its way into a relay: its files, and the blobs that make it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

from protocol.manifest import envelope_to_json
from shardcast.blob_in import BlobIn
from shardcast.client import ShardcastClient
from shardcast.obtain import Obtaining
from shardcast.parcel import Parcel
from shardcast.partial import PartialVersion
from shardcast.storage import StoredVersion


class Incoming:
    """`parcels` are what clients may already ask for. `on_parcel` is called when there is another."""

    def __init__(
        self,
        partial: PartialVersion,
        client: ShardcastClient,
        locked: AsyncExitStack,
        on_parcel: Callable[[], None] = lambda: None,
    ) -> None:
        self.partial = partial
        self.envelope_json = envelope_to_json(partial.envelope)
        self._locked = locked  # holds the store's lock, so that nobody collects what is being filled
        self._on_parcel = on_parcel
        self._obtaining = Obtaining(client, partial, keep_blobs=True, on_shard=self._on_shard, on_blob=self._begin_blob)
        self._files = Parcel(partial, self._obtaining.demand, lambda: self._obtaining.coming)
        self.parcels = [self._files]
        self.task: asyncio.Task[StoredVersion] | None = None  # set by who runs it

    @property
    def version(self) -> int:
        return self.partial.manifest.policy_version

    async def run(self) -> StoredVersion:
        """Fill the version and make it visible. Raises SourceFault, DiskFullError, VersionConflict."""
        return await self._obtaining.run()

    async def close(self) -> None:
        """Free the lock and everyone who waits."""
        self.partial.close()
        await self._locked.aclose()
        for parcel in self.parcels:
            parcel.close()

    def _begin_blob(self, blob: BlobIn) -> None:
        parcel = Parcel(blob.partial, blob.demand, lambda: blob.coming)
        blob.watch(parcel.on_shard)
        self.parcels.append(parcel)
        self._on_parcel()

    def _on_shard(self, index: int) -> None:
        self._files.on_shard(index)
