"""Gets one version whole: out of a blob where that is less and works, and shard by shard where it isn't or doesn't.

Blobs are the deltas from a version that is here, or the version packed. A blob can only make shards that are then held
against the signed manifest, so whatever goes wrong with it (base gone, base damaged on this disk, blob not to be had, blob
wrong) costs time and nothing else: the shards that came out right are kept, the others are fetched, the version that served
as base is untouched, and why it failed is counted and told. Shards are made while the blob comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.digest import Digest
from protocol.errors import SourceFault
from protocol.manifest import Manifest
from shardcast.blob_in import BlobIn
from shardcast.blob_manifest import delta_manifest, packed_manifest
from shardcast.delta.apply import Applied, Applier
from shardcast.delta.blob import table_bytes
from shardcast.delta.decode import DeltaView
from shardcast.delta.errors import BaseUnreadable, FallbackReason, InvalidDelta
from shardcast.delta.views import FolderView, View
from shardcast.download import Download
from shardcast.filling import OnShard
from shardcast.layout import delta_folder_name, packed_folder_name
from shardcast.making import Making
from shardcast.partial import DiskFullError, PartialVersion
from shardcast.pulse import Pulse
from shardcast.storage import StoredVersion
from shardcast.transfer import in_thread, stop
from shardcast.travel import OnProgress, Progress, Way
from shardcast.ways import Ask, Chain, Full, Packed, choose

if TYPE_CHECKING:
    from shardcast.client import ShardcastClient

log = logging.getLogger("shardcast")

OnBlob = Callable[[BlobIn], None]
_THREADS_MAX = 4


class Obtaining:
    """One version on its way in. The caller holds the store's lock for it, opened `partial`, and closes it.

    `keep_blobs`: receive the version's own delta in any case, and keep it and what else came beside the version to pass it
    on. `on_shard` is called in the event loop for each verified shard; `on_blob` for each blob of the version that begins to
    come.
    """

    def __init__(
        self,
        client: ShardcastClient,
        partial: PartialVersion,
        *,
        keep_blobs: bool = False,
        on_shard: OnShard | None = None,
        on_blob: OnBlob | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._client = client
        self._store = client.store
        self._partial = partial
        self._keep_blobs = keep_blobs
        self._on_shard = on_shard
        self._on_blob = on_blob
        self._progress = _Reporter(on_progress)
        self._download: Download | None = None
        self._demanded: list[int] = []
        self._blobs: dict[Path, BlobIn] = {}

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
                blob.partial.close()
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
        if self._keep_blobs and self._manifest.delta is not None and not isinstance(chosen, Chain):
            with contextlib.suppress(SourceFault):  # it is only to be passed on
                await self._receive(await self._delta_of(self._manifest))
        way = Way.FULL
        if isinstance(chosen, (Chain, Packed)):
            before = len(self._partial.missing)
            way = Way.DELTA if isinstance(chosen, Chain) else Way.PACKED
            self._progress.begin(way, 0, self._weight(chosen))
            reason = await (self._by_deltas(chosen) if isinstance(chosen, Chain) else self._by_packed())
            if reason is not None:
                self._client.note_fallback(self._manifest.policy_version, reason)
                way = Way.FULL if len(self._partial.missing) == before else Way.MIXED
        if self._partial.missing:
            await self._fetch_missing(way)
        return way

    @property
    def _manifest(self) -> Manifest:
        return self._partial.manifest

    def _weight(self, chosen: Chain | Packed) -> int:
        if isinstance(chosen, Chain):
            return chosen.size
        assert self._manifest.packed is not None
        return self._manifest.packed.size

    async def _choose(self) -> Full | Packed | Chain:
        """What `ways.choose` says once it has the manifests that it asks for."""
        manifest = self._manifest
        missing = manifest.total_bytes - self._partial.done_bytes
        packed = await self._packed_missing()
        known: dict[Digest, Manifest | None] = {}
        while True:
            held = {version: stored.digest for version, stored in self._store.complete().items()}
            chosen = choose(manifest, missing, held, known, packed)
            if not isinstance(chosen, Ask):
                log.info(
                    "version %d comes %s",
                    manifest.policy_version,
                    _in_words(chosen),
                    extra={"action": "choose_way", "version": manifest.policy_version},
                )
                return chosen
            known[chosen.digest] = await self._client.manifest_if_there(chosen.version, chosen.digest)

    async def _packed_missing(self) -> int | None:
        """How many bytes of the packed form are not here; None if the version has none."""
        if self._manifest.packed is None:
            return None
        begun = self._partial.folder.with_name(packed_folder_name(self._partial.folder.name)).is_dir()
        return (await self._packed()).missing_bytes if begun else self._manifest.packed.size

    async def _fetch_missing(self, way: Way) -> None:
        self._progress.begin(way, self._partial.done_bytes, self._manifest.total_bytes)
        swaps = not self._keep_blobs and self._manifest.packed is None  # else it is the packed form that is swapped
        if swaps and await self._client.fill_with_peers(self._partial, self._progress.add):
            return
        self._download = self._client.download(self._partial, on_shard=self._on_shard, on_bytes=self._progress.add)
        for index in self._demanded:
            self._download.demand(index)
        await self._download.run()

    # By blobs

    async def _by_deltas(self, chain: Chain) -> FallbackReason | None:
        """Make what is missing by deltas, each a view of the one before; says why not all of it could be made."""
        base = self._store.get(chain.base)
        if base is None:
            log.warning("version %d was removed before the delta to it was here", chain.base, extra={"action": "delta"})
            return FallbackReason.BASE_UNREADABLE
        blobs = [await self._delta_of(link) for link in chain.links]
        with self._store.reading(chain.base):  # nobody collects it meanwhile
            return await self._by_blobs(base.path, base.manifest, chain.links, blobs)

    async def _by_packed(self) -> FallbackReason | None:
        """Make what is missing out of the version's packed form; says why not all of it could be made."""
        try:
            return await self._by_blobs(self._partial.folder, None, (self._manifest,), [await self._packed()])
        except DiskFullError as error:
            log.warning("no room for the packed form beside the files: %s", error, extra={"action": "packed"})
            await asyncio.to_thread(self._discard_blobs)
            return FallbackReason.NO_ROOM

    async def _by_blobs(
        self, folder: Path, base: Manifest | None, links: Sequence[Manifest], blobs: Sequence[BlobIn]
    ) -> FallbackReason | None:
        """All but the last blob are received whole before anything is made. Raises DiskFullError."""
        try:
            for blob in blobs[:-1]:
                await self._receive(blob)
            with ExitStack() as opened:
                view: View = opened.enter_context(FolderView(folder, () if base is None else base.files))
                for link, blob in zip(links[:-1], blobs[:-1], strict=True):
                    file = opened.enter_context(blob.open())
                    view = DeltaView(view, link, file.read, file.size)
                return self._judge(await self._make(view, links[-1], blobs[-1]), base)
        except BaseUnreadable as fault:
            log.warning("%s", fault, extra={"action": "delta"})
            return FallbackReason.BASE_UNREADABLE
        except InvalidDelta as fault:
            log.warning("a signed blob is of no use: %s", fault, extra={"action": "delta"})
            return FallbackReason.BLOB_WRONG
        except SourceFault as fault:
            log.warning("a blob can't be had: %s", fault, extra={"action": "delta"})
            return FallbackReason.BLOB_ABSENT

    async def _make(self, base: View, target: Manifest, blob: BlobIn) -> Applied:
        """Make shards while the blob comes. Raises InvalidDelta, SourceFault (it can't be had), DiskFullError."""
        receiving = asyncio.create_task(self._receive(blob))
        try:
            await self._table_of(blob, target, receiving)
            with blob.open() as file:
                view = await in_thread(DeltaView, base, target, file.read, file.size)
                making = asyncio.create_task(self._making(view, blob))
                try:
                    await asyncio.wait({receiving, making}, return_when=asyncio.FIRST_COMPLETED)
                    if receiving.done():
                        receiving.result()
                    applied = await making
                finally:
                    await stop(making)
            if self._keeps(blob):
                await receiving
            return applied
        finally:
            await stop(receiving)

    async def _making(self, view: DeltaView, blob: BlobIn) -> Applied:
        loop = asyncio.get_running_loop()
        on_shard = self._on_shard

        def tell(index: int) -> None:
            if on_shard is not None:
                loop.call_soon_threadsafe(on_shard, index)

        applier = Applier(self._partial, view, on_shard=tell)
        return await Making(applier, view, blob).run(max(1, min(_THREADS_MAX, (os.cpu_count() or 1) // 2)))

    async def _table_of(self, blob: BlobIn, target: Manifest, receiving: asyncio.Task[None]) -> None:
        """Wait until the table of the blob's sections is here, or all of it, or it can't be had."""
        needed = blob.shards_at(0, min(table_bytes(len(target.shards)), blob.partial.manifest.total_bytes))
        for index in needed:
            blob.demand(index)
        pulse = Pulse()
        blob.watch(lambda index: pulse.beat())
        receiving.add_done_callback(lambda task: pulse.beat())
        while not receiving.done() and not all(index in blob.partial.have for index in needed):
            await pulse.wait()
        if receiving.done():
            receiving.result()

    async def _receive(self, blob: BlobIn) -> None:
        """Get a blob, resuming what an earlier process had. Raises SourceFault, DiskFullError."""
        self._progress.add(blob.partial.done_bytes)
        if self._on_blob and blob.partial.manifest.policy_version == self._manifest.policy_version:
            self._on_blob(blob)
        if blob.whole:
            return
        is_swapped = not self._keep_blobs and blob.partial.manifest.torrent_info_hash is not None
        if is_swapped and await self._client.fill_with_peers(blob.partial, self._progress.add, blob.on_shard):
            return
        blob.begin(
            self._client.download(blob.partial, on_shard=blob.on_shard, on_bytes=self._progress.add, is_blob=True)
        )
        assert blob.download is not None
        await blob.download.run()

    async def _delta_of(self, version: Manifest) -> BlobIn:
        name = delta_folder_name(self._partial.folder.name, version.policy_version)
        return await self._blob(name, delta_manifest(version))

    async def _packed(self) -> BlobIn:
        return await self._blob(packed_folder_name(self._partial.folder.name), packed_manifest(self._manifest))

    async def _blob(self, name: str, manifest: Manifest) -> BlobIn:
        folder = self._partial.folder.with_name(name)
        if folder not in self._blobs:
            partial = PartialVersion(folder, self._partial.envelope, manifest, self._partial.digest)
            await asyncio.to_thread(partial.open)
            self._blobs[folder] = BlobIn(partial)
        return self._blobs[folder]

    def _judge(self, applied: Applied, base: Manifest | None) -> FallbackReason | None:
        if not applied.wrong:
            return None
        log.warning(
            "%d of %d shards of version %d came out wrong from %s; fetching them%s",
            applied.wrong,
            applied.wrong + applied.right,
            self._manifest.policy_version,
            "its packed form" if base is None else f"version {base.policy_version}, whose files here may be damaged",
            f": {applied.fault}" if applied.fault else "",
            extra={"action": "delta"},
        )
        if isinstance(applied.fault, BaseUnreadable):
            return FallbackReason.BASE_UNREADABLE
        return FallbackReason.BLOB_WRONG if base is None else FallbackReason.RESULT_DIFFERS

    # What becomes of the blobs

    def _keeps(self, blob: BlobIn) -> bool:
        """Whether it is wanted beyond this version's files: to be passed on, or to be swapped."""
        if blob.partial.manifest.policy_version != self._manifest.policy_version:
            return False
        return self._keep_blobs or (self._client.swaps and blob.partial.manifest.torrent_info_hash is not None)

    def _shelve(self) -> None:
        """Keep the version's own blobs that are whole where they are offered once the version is complete."""
        name = self._partial.folder.name
        for blob in self._blobs.values():
            if not blob.whole or not self._keeps(blob):
                continue
            total = blob.partial.manifest.total_digest
            if self._manifest.delta is not None and total == self._manifest.delta.digest:
                self._store.blobs.adopt(blob.path, self._manifest.delta, name)
            elif self._manifest.packed is not None:
                self._store.packed.adopt(blob.path, self._manifest.packed, name)

    def _discard_blobs(self) -> None:
        while self._blobs:
            _, blob = self._blobs.popitem()
            blob.partial.close()
            blob.discard()


def _in_words(chosen: Full | Packed | Chain) -> str:
    if isinstance(chosen, Chain):
        return f"by {len(chosen.links)} deltas from {chosen.base}"
    return "packed" if isinstance(chosen, Packed) else f"in full ({chosen.why})"


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
