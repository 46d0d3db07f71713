"""A relay reads what it serves again and again, slowly: disks forget, and a rotten shard would only cost its clients time.

Loop: one shard at a time, `bytes_per_s` on average, newest version first; a round begins `pause_s` after the last one.
A version with a wrong shard is taken back among those that are being received (`VersionStore.demote`): what is right of it
counts, and only the rest is fetched.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from shardcast.metrics import ShardcastMetrics
from shardcast.partial import hash_range
from shardcast.storage import StoredVersion, VersionStore
from shardcast.transfer import in_thread

log = logging.getLogger("shardcast")

BYTES_PER_S = 8e6  # a 14 GB model in half an hour, of a core about one percent
_PAUSE_S = 600.0


class Scrubber:
    """`refetch` is called with a version that was demoted."""

    def __init__(
        self,
        store: VersionStore,
        metrics: ShardcastMetrics,
        refetch: Callable[[StoredVersion], Awaitable[None]],
        *,
        bytes_per_s: float = BYTES_PER_S,
        pause_s: float = _PAUSE_S,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._refetch = refetch
        self._bytes_per_s = bytes_per_s
        self._pause_s = pause_s

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            for version in reversed(self._store.versions):
                stored = self._store.get(version)
                if stored is not None:
                    await self._scrub(stored)
            await asyncio.sleep(self._pause_s)

    async def _scrub(self, stored: StoredVersion) -> None:
        bad = []
        for index, shard in enumerate(stored.manifest.shards):
            path = stored.path / stored.manifest.files[shard.file].path
            try:
                digest = await in_thread(hash_range, path, shard.offset, shard.size)
            except FileNotFoundError:
                return  # the version went away
            except OSError as error:
                log.warning("%s can't be read: %s", path, error, extra={"action": "scrub", "version": stored.version})
                digest = None
            if digest != shard.digest:
                bad.append(index)
            await asyncio.sleep(shard.size / self._bytes_per_s)
        if not bad or self._store.get(stored.version) is not stored:
            return
        self._metrics.rotten_shards.inc(len(bad))
        log.warning(
            "%d shards of version %d have rotted on this disk; fetching them anew",
            len(bad),
            stored.version,
            extra={"action": "scrub", "version": stored.version},
        )
        if await asyncio.to_thread(self._store.demote, stored.version, bad):
            await self._refetch(stored)
