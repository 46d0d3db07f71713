"""Gets one version whole: by deltas where that is less and works, and shard by shard where it isn't or doesn't.

A delta can only make shards that are then held against the signed manifest, so whatever goes wrong with it (base gone,
base damaged on this disk, blob not to be had, blob wrong) costs time and nothing else: the shards that came out right are
kept, the others are fetched, the version that served as base is untouched, and why it failed is counted and told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.digest import Digest
from protocol.errors import SourceFault
from protocol.manifest import Manifest
from shardcast.delta.apply import Applied, Applier
from shardcast.delta.decode import BlobFile, DeltaView
from shardcast.delta.errors import BaseUnreadable, FallbackReason, InvalidDelta
from shardcast.delta.views import FolderView, View
from shardcast.download import Download, OnShard
from shardcast.layout import delta_folder_name
from shardcast.partial import PartialVersion, journal_path
from shardcast.storage import StoredVersion
from shardcast.travel import OnProgress, Progress, Way
from shardcast.ways import BLOB_FILE, Ask, Chain, blob_manifest, choose

if TYPE_CHECKING:
    from shardcast.client import ShardcastClient

log = logging.getLogger("shardcast")

OnBlob = Callable[[PartialVersion], OnShard]
_THREADS_MAX = 4


class Obtaining:
    """One version on its way in. The caller holds the store's lock for it, opened `partial`, and closes it.

    `keep_blob`: receive the version's own delta in any case, and keep it beside the version to pass it on. `on_shard` is
    called in the event loop for each verified shard; `on_blob` once, when the version's own delta begins to come, and
    gives what is called for each shard of that.
    """

    def __init__(
        self,
        client: ShardcastClient,
        partial: PartialVersion,
        *,
        keep_blob: bool = False,
        on_shard: OnShard | None = None,
        on_blob: OnBlob | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._client = client
        self._store = client.store
        self._partial = partial
        self._keep_blob = keep_blob
        self._on_shard = on_shard
        self._on_blob = on_blob
        self._progress = _Reporter(on_progress)
        self._download: Download | None = None
        self._demanded: list[int] = []
        self._blobs: dict[int, PartialVersion] = {}

    def demand(self, index: int) -> None:
        """Somebody waits for this shard: should it be fetched, fetch it before the others."""
        if self._download is not None:
            self._download.demand(index)
        else:
            self._demanded.append(index)

    @property
    def coming(self) -> list[int]:
        """The shards that are being sent now."""
        return [] if self._download is None else self._download.coming

    async def run(self) -> StoredVersion:
        """Fill the version and make it visible. Raises SourceFault, DiskFullError, VersionConflict.

        What was received stays on the disk for the next attempt.
        """
        try:
            way = await self._fill()
        finally:
            for blob in self._blobs.values():
                blob.close()
        if self._keep_blob:
            await asyncio.to_thread(self._shelve)
        stored = await asyncio.to_thread(self._store.finish, self._partial)
        await asyncio.to_thread(self._discard_blobs)
        self._progress.end(way)
        self._client.note_way(way)
        return stored

    async def _fill(self) -> Way:
        if not self._partial.missing:
            return Way.FULL
        chosen = await self._choose()
        way = Way.FULL
        if isinstance(chosen, Chain):
            before = len(self._partial.missing)
            reason = await self._by_delta(chosen)
            if reason is not None:
                self._client.note_fallback(self._partial.manifest.policy_version, reason)
            way = Way.DELTA if reason is None else Way.FULL if len(self._partial.missing) == before else Way.MIXED
        elif self._keep_blob and self._partial.manifest.delta is not None:
            with contextlib.suppress(SourceFault):  # it is only to be passed on
                await self._receive(self._partial.manifest)
        if self._partial.missing:
            await self._fetch_missing(way)
        return way

    async def _choose(self) -> object:
        """What `ways.choose` says once it has the manifests that it asks for."""
        manifest = self._partial.manifest
        missing = manifest.total_bytes - self._partial.done_bytes
        known: dict[Digest, Manifest | None] = {}
        while True:
            held = {version: stored.digest for version, stored in self._store.complete().items()}
            chosen = choose(manifest, missing, held, known)
            if not isinstance(chosen, Ask):
                log.info(
                    "version %d comes %s",
                    manifest.policy_version,
                    f"by {len(chosen.links)} deltas from {chosen.base}"
                    if isinstance(chosen, Chain)
                    else f"in full ({chosen.why})",
                    extra={"action": "choose_way", "version": manifest.policy_version},
                )
                return chosen
            known[chosen.digest] = await self._client.manifest_if_there(chosen.version, chosen.digest)

    async def _fetch_missing(self, way: Way) -> None:
        self._progress.begin(way, self._partial.done_bytes, self._partial.manifest.total_bytes)
        if self._on_shard is None and await self._client.fill_with_peers(self._partial, self._progress.add):
            return
        self._download = self._client.download(self._partial, on_shard=self._on_shard, on_bytes=self._progress.add)
        for index in self._demanded:
            self._download.demand(index)
        await self._download.run()

    # By deltas

    async def _by_delta(self, chain: Chain) -> FallbackReason | None:
        """Make what is missing; says why not all of it could be made. Raises DiskFullError."""
        self._progress.begin(Way.DELTA, 0, chain.size)
        with self._store.reading(chain.base):  # nobody collects it meanwhile
            try:
                for link in chain.links:
                    await self._receive(link)
            except SourceFault as fault:
                log.warning("a delta can't be had: %s", fault, extra={"action": "delta"})
                return FallbackReason.BLOB_ABSENT
            try:
                return self._judge(await self._make(chain), chain.base)
            except InvalidDelta as fault:
                log.warning("a signed delta is of no use: %s", fault, extra={"action": "delta"})
                return FallbackReason.BLOB_WRONG
            except BaseUnreadable as fault:
                log.warning("%s", fault, extra={"action": "delta"})
                return FallbackReason.BASE_UNREADABLE

    async def _make(self, chain: Chain) -> Applied:
        """Apply all deltas at once: each is a view of the one before. Raises InvalidDelta, BaseUnreadable, DiskFullError."""
        base = self._store.get(chain.base)
        if base is None:
            raise BaseUnreadable(f"version {chain.base} was removed before the delta to it was here")
        with ExitStack() as opened:
            view: View = opened.enter_context(FolderView(base.path, base.manifest.files))
            for link in chain.links:
                blob = opened.enter_context(BlobFile(self._blobs[link.policy_version].folder / BLOB_FILE))
                view = DeltaView(view, link, blob.read, blob.size)
            assert isinstance(view, DeltaView), "a chain has a link"
            return await self._apply(view)

    async def _receive(self, link: Manifest) -> None:
        """Get the blob of one version, resuming what an earlier process had. Raises SourceFault, DiskFullError."""
        own = link is self._partial.manifest
        folder = self._partial.folder.with_name(delta_folder_name(self._partial.folder.name, link.policy_version))
        blob = PartialVersion(folder, self._partial.envelope, blob_manifest(link), self._partial.digest)
        self._blobs[link.policy_version] = blob
        await asyncio.to_thread(blob.open)
        self._progress.add(blob.done_bytes)
        on_shard = self._on_blob(blob) if own and self._on_blob else None
        if blob.missing:
            await self._client.download(blob, on_shard=on_shard, on_bytes=self._progress.add, is_delta=True).run()

    async def _apply(self, view: DeltaView) -> Applied:
        """In threads, which end before this does, also when it is cancelled."""
        loop = asyncio.get_running_loop()
        on_shard = self._on_shard

        def tell(index: int) -> None:
            if on_shard is not None:
                loop.call_soon_threadsafe(on_shard, index)

        threads = max(1, min(_THREADS_MAX, (os.cpu_count() or 1) // 2))
        applier = Applier(self._partial, view, threads=threads, on_shard=tell)
        running = asyncio.ensure_future(asyncio.to_thread(applier.run))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            applier.stop()
            await asyncio.gather(running, return_exceptions=True)
            raise

    def _judge(self, applied: Applied, base: int) -> FallbackReason | None:
        if not applied.wrong:
            return None
        log.warning(
            "%d of %d shards of version %d came out wrong from version %d, whose files here may be damaged; fetching them%s",
            applied.wrong,
            applied.wrong + applied.right,
            self._partial.manifest.policy_version,
            base,
            f": {applied.fault}" if applied.fault else "",
            extra={"action": "delta"},
        )
        unreadable = isinstance(applied.fault, BaseUnreadable)
        return FallbackReason.BASE_UNREADABLE if unreadable else FallbackReason.RESULT_DIFFERS

    # What becomes of the blobs

    def _shelve(self) -> None:
        """Keep the version's own blob, if it is whole, where it is offered once the version is complete."""
        delta = self._partial.manifest.delta
        blob = self._blobs.get(self._partial.manifest.policy_version)
        if delta is not None and blob is not None and not blob.missing:
            self._store.blobs.adopt(blob.folder / BLOB_FILE, delta, self._partial.folder.name)

    def _discard_blobs(self) -> None:
        for blob in self._blobs.values():
            shutil.rmtree(blob.folder, ignore_errors=True)
            Path(journal_path(blob.folder)).unlink(missing_ok=True)


class _Reporter:
    """Tells how far it is; never more than all."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._on_progress = on_progress
        self._done = self._total = 0
        self._way = Way.FULL

    def begin(self, way: Way, done: int, total: int) -> None:
        self._way, self._done, self._total = way, done, total
        self.add(0)

    def add(self, count: int) -> None:
        self._done = min(self._total, self._done + count)
        if self._on_progress:
            self._on_progress(Progress(self._done, self._total, self._way))

    def end(self, way: Way) -> None:
        self._way, self._done = way, self._total
        self.add(0)
