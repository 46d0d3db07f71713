"""A relay gets the packed form of a version when a client first asks for it, if it came by another way itself.

Loop: one task per version, at most `_MOST` at a time, fetches it from upstream and ends; what came is passed on shard by
shard meanwhile. A version that upstream doesn't give is not asked for again within `_ABSENT_S`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from protocol.digest import Digest
from protocol.errors import SourceFault
from shardcast.blob_in import BlobIn
from shardcast.client import ShardcastClient
from shardcast.parcel import Parcel
from shardcast.partial import DiskFullError
from shardcast.storage import StoredVersion

log = logging.getLogger("shardcast")

_MOST = 2
_ABSENT_S = 30.0


class PackedPulls:
    """`on_parcel` is called when there is another thing that clients may ask for, or one less."""

    def __init__(
        self, client: ShardcastClient, on_parcel: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._on_parcel = on_parcel
        self._clock = clock
        self._parcels: dict[Digest, Parcel] = {}
        self._tasks: dict[Digest, asyncio.Task[None]] = {}
        self._absent: dict[Digest, float] = {}

    @property
    def parcels(self) -> list[Parcel]:
        """What is on its way."""
        return list(self._parcels.values())

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """To be cancelled at the end."""
        return list(self._tasks.values())

    def want(self, total: Digest) -> None:
        """A client asks for what has this total digest: begin to get it, if it is the packed form of a version here."""
        if total in self._tasks or len(self._tasks) >= _MOST or self._absent.get(total, 0.0) > self._clock():
            return
        stored = self._client.store.lacks_packed(total)
        if stored is not None:
            self._tasks[total] = asyncio.create_task(self._pull(stored, total))

    async def _pull(self, stored: StoredVersion, total: Digest) -> None:
        def begin(blob: BlobIn) -> None:
            parcel = Parcel(blob.partial, blob.demand, lambda: blob.coming)
            blob.watch(parcel.on_shard)
            self._parcels[total] = parcel
            self._on_parcel()

        try:
            with self._client.store.reading(stored.version):
                await self._client.fetch_packed(stored, begin)
        except (SourceFault, DiskFullError, OSError) as error:
            self._absent = {digest: until for digest, until in self._absent.items() if until > self._clock()}
            self._absent[total] = self._clock() + _ABSENT_S
            log.warning(
                "can't get version %d packed: %s",
                stored.version,
                error,
                extra={"action": "pull", "version": stored.version},
            )
        finally:
            parcel = self._parcels.pop(total, None)
            del self._tasks[total]
            if parcel is not None:
                parcel.close()
            self._on_parcel()
