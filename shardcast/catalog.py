"""What a server offers its clients: a head, signed manifests, and shards. An origin's are always complete."""

from __future__ import annotations

import asyncio
import os
import secrets
from dataclasses import dataclass

from protocol.manifest import Digest, Manifest, envelope_to_json
from shardcast.asker import CLIENT, Asker
from shardcast.have import Have
from shardcast.manners import Manners
from shardcast.metrics import ShardcastMetrics
from shardcast.pulse import Pulse
from shardcast.reports import Reports
from shardcast.sources import Head, NotYet
from shardcast.storage import ShardLocation, StoredVersion, VersionStore

__all__ = ["Catalog", "NotYet", "OpenShard"]


@dataclass(slots=True)
class OpenShard:
    """An open file and the byte range that is the shard. Whoever gets it closes it."""

    descriptor: int
    version: int
    offset: int
    size: int

    @classmethod
    def at(cls, location: ShardLocation) -> OpenShard:
        """Open a shard where it lies. Raises FileNotFoundError if it was removed meanwhile."""
        descriptor = os.open(location.path, os.O_RDONLY)
        return cls(descriptor, location.version, location.offset, location.size)

    def close(self) -> None:
        os.close(self.descriptor)


class Catalog:
    """Complete versions of a store. The head only rises; `close` frees everyone who waits for it."""

    role = "origin"

    def __init__(self, store: VersionStore, metrics: ShardcastMetrics, server_id: str | None = None) -> None:
        self.store = store
        self.metrics = metrics
        self.server_id = server_id or secrets.token_hex(8)
        self.manners = Manners()
        self._head: Head | None = None
        self.changed = Pulse()  # beats when the head, or what is here or on its way, changes
        self._closed = False
        self.reports = Reports(metrics, lambda: None if self._head is None else self._head.version)
        self._rotations = len(store.keys.ring.statements)
        if store.head is not None:
            self.announce(store.head)

    @property
    def head(self) -> Head | None:
        """The newest version that clients are told of."""
        return self._head

    @property
    def closed(self) -> bool:
        """Whether everyone who waits is to be answered now."""
        return self._closed

    def announce(self, stored: StoredVersion) -> None:
        """Make a complete version the head, if it is newer."""
        self._raise_head(Head(stored.version, stored.digest))

    async def wait_head(self, after: int | None, wait_s: float) -> Head | None:
        """The head once it is above `after` (None: once there is one), or None after `wait_s`."""
        await self.changed.wait_until(lambda: self._is_news(after) or self._closed, wait_s)
        return self._head if self._is_news(after) else None

    async def have(self, total: Digest, epoch: str, after: int, wait_s: float, asker: Asker = CLIENT) -> Have | None:
        """Which shards of the version with this total digest are here, once that is more than the asker knows.

        The asker knows the first `after` of the list named `epoch`. None if nothing was new within `wait_s`.
        """
        await self.changed.wait_until(lambda: self._closed or self.store.holds(total), wait_s)
        return Have(self.role, self.server_id, complete=True) if self.store.holds(total) else None

    async def manifest_json(self, version: int, asker: Asker = CLIENT) -> bytes | None:
        """The signed manifest of a version as HTTP carries it, or None if it isn't here."""
        stored = self.store.get(version)
        return None if stored is None else envelope_to_json(stored.envelope)

    def manifest(self, version: int) -> Manifest | None:
        """The manifest of a version that is here, perhaps not whole yet."""
        stored = self.store.get(version)
        return None if stored is None else stored.manifest

    async def torrent(self, version: int) -> bytes | None:
        """The torrent of a version that is here, if it has one. Raises NotYet while it is on its way."""
        stored = self.store.get(version)
        return None if stored is None else await asyncio.to_thread(self.store.torrents.get, version, stored.digest)

    async def open_shard(self, digest: Digest, wait_s: float) -> OpenShard | None:
        """The shard, or None if no manifest here names it. Raises NotYet if it doesn't come within `wait_s`."""
        location = self.store.locate(digest)
        if location is None:
            return None
        try:
            return OpenShard.at(location)
        except FileNotFoundError:
            return None

    def health(self) -> dict[str, object]:
        """What `/healthz` and the status page show."""
        complete = self.store.head
        return {
            "status": "ok",
            "role": self.role,
            "id": self.server_id,
            "following": True,
            "head": None if self._head is None else self._head.version,
            "head_digest": None if self._head is None else self._head.manifest_digest,
            "complete": None if complete is None else complete.version,
            "versions": self.store.versions,
            "next_version": 0 if self.store.names.latest is None else self.store.names.latest + 1,
            "delta_fallbacks": [f"{count} × {reason}" for reason, count in sorted(self.reports.counts.items())],
            "key_rotations": len(self.store.keys.ring.statements),
            "behind_s": round(self.metrics.behind_s, 1),
            "mbytes_per_s_out": round(self.metrics.rate_out / 1e6, 2),
            "mbytes_per_s_in": round(self.metrics.rate_in / 1e6, 2),
            "bytes_sent": self.metrics.bytes_sent,
            "receiving": [],
            "sources": [],
        }

    def reconsider(self) -> None:
        """After a rotation of the trainer's key: what a rotated-away key signed above its last version is no head."""
        if len(self.store.keys.ring.statements) == self._rotations:
            return
        self._rotations = len(self.store.keys.ring.statements)
        complete = self.store.head
        self._head = None if complete is None else Head(complete.version, complete.digest)
        self.changed.beat()

    def close(self) -> None:
        """Answer all waiting clients now."""
        self._closed = True
        self.changed.beat()

    def _raise_head(self, head: Head) -> None:
        if self._head is None or head.version > self._head.version:
            self._head = head
        self.changed.beat()
        self._update_gauges()

    def _update_gauges(self) -> None:
        complete = self.store.head
        announced = None if self._head is None else self._head.version
        self.metrics.set_versions(None if complete is None else complete.version, announced)

    def _is_news(self, after: int | None) -> bool:
        return self._head is not None and (after is None or self._head.version > after)
