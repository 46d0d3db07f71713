"""The client that workers, verifiers and relays use to get versions. Nothing that a source says is believed.

A version number is taken for published only with its manifest, signed by a pinned key; bytes only with their
digest; and a number that was once seen complete with one digest is never accepted with another.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import aiohttp

from protocol.errors import SourceFault
from protocol.manifest import Digest, Manifest, SignedEnvelope, manifest_digest
from shardcast.asker import CLIENT, Asker, Kind
from shardcast.bandwidth import Throttle
from shardcast.blob_in import BlobIn
from shardcast.blob_manifest import packed_manifest, swapped
from shardcast.config import ClientLimits, parse_keys, parse_source, parse_sources
from shardcast.delta.errors import FallbackReason
from shardcast.download import Download
from shardcast.filling import Filling, OnShard
from shardcast.layout import packed_folder_name
from shardcast.manners import Manners
from shardcast.metrics import ShardcastMetrics
from shardcast.obtain import Obtaining, OnBlob
from shardcast.partial import PartialVersion
from shardcast.peering import Peering, find_torrent
from shardcast.pool import SourcePool
from shardcast.proven import Proven
from shardcast.reports import send_report
from shardcast.routing import SourceStats
from shardcast.sources import Head, Source, new_session
from shardcast.storage import StoredVersion, VersionStore
from shardcast.swarm import Swarm
from shardcast.torrent import Layout
from shardcast.travel import OnProgress, Progress, Way

__all__ = ["OnProgress", "Progress", "ShardcastClient", "Way"]

log = logging.getLogger("shardcast")

_MAX_TELLING = 4
_MAX_PEERS = 32


class ShardcastClient:
    """Pulls versions from many sources into one cache directory. One event loop; several processes may share a cache.

    `sources`: base URLs of relays and origins, preferred first. `pinned_keys`: the trainer's key ids.
    `peers`, `own_id`: a relay's siblings, and the id it answers with itself; it takes from them what they have.
    `swarm`: if given, versions are swapped with other clients that do the same; it is closed with the client.
    `run_id`: if given, versions of another run are refused even when signed by a pinned key.
    Complete versions lie in `cache_dir/versions/<version>-<digest prefix>/`. Use as `async with`, or call `close`.
    """

    def __init__(
        self,
        sources: Sequence[str],
        pinned_keys: Collection[str],
        cache_dir: Path | str,
        *,
        peers: Sequence[str] = (),
        own_id: str = "",
        limits: ClientLimits | None = None,
        run_id: str | None = None,
        max_mbit: float | None = None,
        metrics: ShardcastMetrics | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        store: VersionStore | None = None,
        swarm: Swarm | None = None,
    ) -> None:
        self._urls = parse_sources(sources)
        self._peers = [url for url in dict.fromkeys(map(parse_source, peers)) if url not in self._urls]
        self.own_id = own_id
        self.manners = Manners(clock)
        self._limits = limits or ClientLimits()
        self._throttle = Throttle.from_mbit(max_mbit)
        self._metrics = metrics
        self._rng = rng or random.Random()
        self._clock = clock
        self.store = store or VersionStore(Path(cache_dir), parse_keys(pinned_keys), durable=False)
        self._peering = Peering(swarm, self.store, self._limits.swarm) if swarm else None
        self._proven = Proven(self.store, self._limits, self._opened, run_id=run_id, clock=clock)
        self._session: aiohttp.ClientSession | None = None
        self._pool: SourcePool | None = None
        self._telling: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ShardcastClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*self._telling, return_exceptions=True)
        if self._peering is not None:
            await self._peering.close()
        if self._session is not None:
            await self._session.close()
            self._session = self._pool = None

    @property
    def peers(self) -> list[str]:
        """The siblings' URLs."""
        return list(self._peers)

    @property
    def source_stats(self) -> dict[str, SourceStats]:
        """What is known of each source, by URL."""
        return self._opened().stats

    async def head(self, after: int | None = None, wait_s: float = 0.0) -> Head | None:
        """The newest version above `after`, believed only with its signed manifest; None if none came in time.

        Without `after` the highest that any source proves now, or else the first that comes. With it, all sources are
        asked at once and the first that proves a newer version decides. Raises SourceFault if every source failed.
        """
        return await self._proven.head(after, wait_s)

    async def manifest(
        self, version: int, expected_digest: Digest | str | None = None
    ) -> tuple[Manifest, SignedEnvelope]:
        """A version's manifest, checked against the trainer's keys and, if given, the expected digest.

        Taken from the cache or from the first source that proves it. With an expected digest the version is known to
        exist, so sources that don't have it yet are asked again until the deadline. Raises SourceFault.
        """
        return await self._proven.manifest(version, expected_digest)

    async def manifest_if_there(self, version: int, digest: Digest) -> Manifest | None:
        """The manifest with this digest, if it is here or a source has it at hand; None if not. Nobody waits for it."""
        return await self._proven.manifest_if_there(version, digest)

    async def fetch(
        self,
        version: int,
        expected_digest: Digest | str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Path:
        """The folder with the files of a version, fetched if it isn't here. It appears whole or not at all.

        Resumes what an earlier process had verified. Raises SourceFault saying what each source did wrong,
        VersionConflict if the number names another digest, DiskFullError.
        """
        manifest, envelope = await self.manifest(version, expected_digest)
        digest = manifest_digest(envelope.payload)
        async with self.store.lock(version, digest):
            await asyncio.to_thread(self.store.refresh)
            stored = self.store.get(version)
            if stored is None:
                stored = await self._fill(manifest, envelope, on_progress)
        if stored.digest != digest:
            raise SourceFault(f"version {version} is here as {stored.digest} and was asked for as {digest}")
        if self._metrics:
            self._metrics.set_versions(version, max(self._proven.newest, version))
        return stored.path

    def add_peers(self, urls: Iterable[str]) -> None:
        """Siblings more, from the next version on. Known ones stay; so many at most that they can all be asked."""
        for url in map(parse_source, urls):
            if url in self._urls or url in self._peers or len(self._peers) >= _MAX_PEERS:
                continue
            self._peers.append(url)
            if self._pool is not None and self._session is not None:
                self._pool.add(Source(url, self._session, self._limits, peer=True, asker=self._as_sibling))
            log.info("a sibling: %s", url, extra={"action": "add_peer", "source": url})

    def prune(self, keep: Iterable[int]) -> list[int]:
        """Remove every complete version but these; their numbers stay bound. Returns what was removed. Blocking.

        Files that are open or mapped stay readable until they are closed.
        """
        kept = set(keep)
        gone = [version for version in self.store.versions if version not in kept]
        self.store.remove(gone)
        self.store.remove_stale_partials()
        return gone

    def note_way(self, way: Way) -> None:
        """A version became complete."""
        if self._metrics:
            self._metrics.ways.labels(way.value).inc()

    def note_fallback(self, version: int, reason: FallbackReason) -> None:
        """A delta was of no use: count it, and tell a source, whose operator would not know otherwise."""
        if self._metrics:
            self._metrics.fallbacks.labels(reason.value).inc()
        self.tell_fallback(version, reason)

    def tell_fallback(self, version: int, reason: FallbackReason) -> None:
        """Tell the best source, in the background; whether it listens changes nothing here."""
        sources = self._opened().usable()
        if sources and self._session is not None and len(self._telling) < _MAX_TELLING:
            task = asyncio.create_task(send_report(self._session, sources[0].url, version, reason))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    def download(
        self,
        partial: PartialVersion,
        *,
        on_shard: OnShard | None = None,
        on_bytes: Callable[[int], None] | None = None,
        is_blob: bool = False,
    ) -> Download:
        """A run that fills `partial` from this client's sources; relays watch it shard by shard.

        `is_blob`: it can be done without, so less patience.
        """
        limits = self._limits
        if is_blob:
            limits = replace(limits, deadline_s=min(limits.deadline_s, limits.delta_deadline_s))
        return Download(
            self._filling(partial, on_shard, on_bytes),
            limits,
            rng=self._rng,
            own_id=self.own_id,
            busy=lambda: self.manners.busy,
        )

    async def fetch_packed(self, stored: StoredVersion, on_blob: OnBlob) -> None:
        """Get the packed form of a version that is whole without it, and keep it beside the version.

        `on_blob` is called when it begins to come. Raises SourceFault, DiskFullError; what came stays then.
        """
        folder = self.store.root / "partial" / packed_folder_name(stored.path.name)
        partial = PartialVersion(folder, stored.envelope, packed_manifest(stored.manifest), stored.digest)
        async with self.store.lock(stored.version, stored.digest):
            await asyncio.to_thread(partial.open)
            blob = BlobIn(partial)
            try:
                blob.begin(self.download(partial, on_shard=blob.on_shard, is_blob=True))
                on_blob(blob)
                if not blob.whole and blob.download is not None:
                    await blob.download.run()
            finally:
                partial.close()
            await asyncio.to_thread(self.store.keep_packed, stored.version, blob.path)
            await asyncio.to_thread(blob.discard)

    async def _fill(
        self, manifest: Manifest, envelope: SignedEnvelope, on_progress: OnProgress | None
    ) -> StoredVersion:
        partial = await asyncio.to_thread(self.store.open_partial, envelope, manifest)
        try:
            stored = await Obtaining(self, partial, on_progress=on_progress).run()
            if self._peering is not None:
                self._peering.seed(stored, self._opened())
            return stored
        finally:
            partial.close()

    async def fill_with_peers(
        self, partial: PartialVersion, on_bytes: Callable[[int], None], on_shard: OnShard | None = None
    ) -> bool:
        """Fill what is missing by swapping with peers; False if this client doesn't, or what they give is not enough."""
        return self._peering is not None and await self._peering.fill(self._filling(partial, on_shard, on_bytes))

    def _filling(
        self, partial: PartialVersion, on_shard: OnShard | None, on_bytes: Callable[[int], None] | None
    ) -> Filling:
        return Filling(
            partial,
            self._opened(),
            store=self.store,
            on_shard=on_shard,
            on_bytes=on_bytes,
            throttle=self._throttle,
            metrics=self._metrics,
            clock=self._clock,
        )

    @property
    def swaps(self) -> bool:
        """Whether this client swaps with peers."""
        return self._peering is not None

    @property
    def swapped(self) -> list[int]:
        """The versions that are swapped with peers now, ascending."""
        return [] if self._peering is None else self._peering.versions

    async def torrent(self, manifest: Manifest) -> bytes | None:
        """The torrent that a manifest names, from whichever source has it; None if there is none."""
        content = swapped(manifest)
        layout = Layout.of(content)
        return None if layout is None else await find_torrent(content, layout, self._opened())

    def _as_relay(self) -> Asker:
        return Asker(Kind.RELAY, self.own_id) if self.own_id else CLIENT

    def _as_sibling(self) -> Asker:
        return Asker(Kind.PEER, self.own_id, self.manners.busy) if self.own_id else CLIENT

    def _opened(self) -> SourcePool:
        """The session needs a running loop, so it is made at the first use."""
        if self._pool is None:
            session = self._session = new_session(self._limits)
            self._pool = SourcePool(
                [
                    *(Source(url, session, self._limits, asker=self._as_relay) for url in self._urls),
                    *(Source(url, session, self._limits, peer=True, asker=self._as_sibling) for url in self._peers),
                ],
                ban_s=self._limits.ban_s,
                rng=self._rng,
                clock=self._clock,
            )
            if self._peering is not None:
                for stored in self.store.complete().values():  # of an earlier process
                    self._peering.seed(stored, self._pool)
        return self._pool
