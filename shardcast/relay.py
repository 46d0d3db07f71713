"""A relay: follows the newest version and passes each shard on as soon as it is verified.

Loops: `follow` waits for a head above the one it has or is receiving (long poll upstream), begins that version and
tells its own clients at once. A newer version is begun while an older one still comes; beyond `_MAX_INCOMING` a slow
relay skips versions instead of falling behind. Versions that a client asks for and that are not here are pulled
through in the same way. Upstream lost: back off, keep serving, try again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AsyncExitStack
from typing import Any

from protocol.errors import SourceFault
from protocol.manifest import Digest, Manifest, SignedEnvelope, manifest_digest
from shardcast.asker import CLIENT, Asker, Kind
from shardcast.catalog import Catalog, OpenShard
from shardcast.client import ShardcastClient
from shardcast.discovery import Coordinator
from shardcast.have import Have
from shardcast.incoming import Incoming
from shardcast.metrics import ShardcastMetrics
from shardcast.packed_pull import PackedPulls
from shardcast.parcel import Parcel
from shardcast.partial import DiskFullError, PartialVersion
from shardcast.retention import make_room, needed
from shardcast.sources import Head, NotYet
from shardcast.storage import StoredVersion, VersionStore

log = logging.getLogger("shardcast")

_POLL_S = 30.0
_PAUSE_FIRST_S = 0.5
_PAUSE_MAX_S = 30.0
_DISCOVER_S = 300.0
_MAX_INCOMING = 4  # versions being received at once
_ABSENT_S = 30.0  # a version that upstream didn't have is not asked for again within this
_RECENT_S = 600.0  # a version that a client asked for is kept this long


class RelayCatalog(Catalog):
    """A catalog that also offers versions that are still on their way in."""

    role = "relay"

    def __init__(
        self,
        store: VersionStore,
        metrics: ShardcastMetrics,
        client: ShardcastClient,
        *,
        keep_last: int,
        max_disk_bytes: int | None = None,
        coordinator: Coordinator | None = None,
        server_id: str | None = None,
        help_peers: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(store, metrics, server_id or client.own_id)
        self.manners = client.manners
        self._client = client
        self._keep_last = keep_last
        self._help_peers = help_peers
        self._max_disk_bytes = max_disk_bytes
        self._coordinator = coordinator
        self._needed: set[int] = set()
        self._clock = clock
        self._incoming: dict[int, Incoming] = {}
        self._absent: dict[int, float] = {}
        self._pulling: Counter[int] = Counter()  # versions whose manifest upstream is being asked for
        self._asked: dict[int, float] = {}  # versions that were pulled through, and when they were last asked for
        self._starting = asyncio.Lock()
        self._begun = -1  # the newest version that was begun, and the task that fills it
        self._newest: asyncio.Task[StoredVersion] | None = None
        self._packed = PackedPulls(client, self.changed.beat)
        self._getting_torrent: dict[int, asyncio.Task[None]] = {}
        self._trouble = ""  # why the newest version can't be had
        self.reports.on_report = lambda report: client.tell_fallback(report.version, report.reason)

    async def follow(self) -> None:
        """Stay at the newest version until cancelled."""
        pause = _PAUSE_FIRST_S
        began = self._clock()
        self.metrics.set_lost(began)
        while True:
            try:
                head = await self._next_head()
                self.reconsider()
                if head is not None:
                    await self._take(head)
                self._trouble = ""
                began = self._clock()
                self.metrics.set_lost(None)
                pause = _PAUSE_FIRST_S
            except (SourceFault, DiskFullError, OSError) as error:
                self._trouble = str(error) or type(error).__name__
                self.metrics.set_lost(began)
                log.warning("can't follow, next try in %.1f s: %s", pause, error, extra={"action": "follow"})
                await asyncio.sleep(pause)
                pause = min(pause * 2, _PAUSE_MAX_S)

    async def _next_head(self) -> Head | None:
        """A head above what is here or on its way; None after a while, or when what was on its way is whole.

        Raises what the newest version on its way failed with: it is taken again then.
        """
        complete = self.store.head
        after = None if complete is None else complete.version
        newest, self._newest = self._newest, None
        if newest is None or newest.done():
            if newest is not None:
                newest.result()
            return await self._client.head(after, _POLL_S)
        self._newest = newest
        polling = asyncio.create_task(self._client.head(self._begun, _POLL_S))
        try:
            full = len(self._incoming) >= _MAX_INCOMING
            await asyncio.wait({newest} if full else {newest, polling}, return_when=asyncio.FIRST_COMPLETED)
            return polling.result() if polling.done() and not full else None
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)

    async def manifest_json(self, version: int, asker: Asker = CLIENT) -> bytes | None:
        if version in self._asked:
            self._asked[version] = self._clock()
        here = await super().manifest_json(version)
        if here is not None:
            return here
        incoming = self._incoming.get(version)
        if incoming is None and self._may_pull(version, asker):
            incoming = await self._pull_through(version)
        if incoming is None:
            return await super().manifest_json(version)
        return incoming.envelope_json

    def manifest(self, version: int) -> Manifest | None:
        incoming = self._incoming.get(version)
        return super().manifest(version) if incoming is None else incoming.partial.manifest

    async def torrent(self, version: int) -> bytes | None:
        manifest = self.manifest(version)
        if manifest is None:
            return None
        here = await asyncio.to_thread(self.store.torrents.get, version, manifest_digest(manifest.to_json_bytes()))
        if here is None and version in self._getting_torrent:
            raise NotYet("the torrent is on its way")
        return here

    async def have(self, total: Digest, epoch: str, after: int, wait_s: float, asker: Asker = CLIENT) -> Have | None:
        deadline = self._clock() + wait_s
        if asker.kind is not Kind.PEER:
            self._packed.want(total)
        while True:
            parcel = next((each for each in self._parcels() if each.total == total), None)
            left = deadline - self._clock()
            if parcel is None or self.store.holds(total):
                known = await self.changed.wait_until(lambda: self._knows(total), max(0.0, left))
                if self.store.holds(total) or not known or self._closed:
                    return await super().have(total, epoch, after, 0.0)
                continue
            news = parcel.have(self.role, self.server_id, epoch, after)
            if news is not None or left <= 0:
                return news
            await parcel.wait_news(epoch, after, left)
            if parcel.closed and not self._knows(total):
                return None  # the transfer broke off

    async def open_shard(self, digest: Digest, wait_s: float) -> OpenShard | None:
        here = await super().open_shard(digest, wait_s)
        if here is not None:
            return here
        naming = [each for each in self._parcels() if each.names(digest)]
        if not naming:
            return None
        # Several may hold the shard: the one that has it, or else that of the newest version, which is filled first.
        parcel = max(naming, key=lambda each: (each.has(digest), each.partial.manifest.policy_version))
        location = await parcel.wait_shard(digest, wait_s)
        try:
            return OpenShard.at(location)
        except FileNotFoundError:  # the version became whole and is moving: a moment later the store has it
            incoming = self._incoming.get(location.version)
            if incoming is not None and incoming.task is not None:
                await asyncio.wait([incoming.task], timeout=max(wait_s, 1.0))
            return await super().open_shard(digest, wait_s)

    def health(self) -> dict[str, object]:
        facts = super().health()
        now = self._clock()
        lost_s = self.metrics.lost_s
        facts["following"] = lost_s is None
        trouble = "" if lost_s is None else self._trouble or self._faults(now)
        if trouble:
            here = "still serving what is here" if self.store.versions else "and nothing is here to be served"
            facts["status"] = f"can't follow for {lost_s:.0f} s, {here}: {trouble}"
        facts["receiving"] = [
            {"version": each.version, "have": len(each.partial.have), "of": len(each.partial.manifest.shards)}
            for each in self._incoming.values()
        ]
        facts["sources"] = [
            {
                "url": url,
                "peer": url in self._client.peers,
                "state": "dropped" if now < stats.banned_until else "ok" if stats.is_ready(now) else "backing off",
                "mbytes_per_s": round((stats.throughput or 0.0) / 1e6, 1),
                "last_fault": stats.last_fault if stats.is_troubled(now) else "",
            }
            for url, stats in self._client.source_stats.items()
        ]
        return facts

    def _faults(self, now: float) -> str:
        """What every source did wrong; empty if one of them didn't."""
        known = self._client.source_stats.values()
        return "; ".join(each.last_fault for each in known) if all(each.is_troubled(now) for each in known) else ""

    async def find_siblings(self) -> None:
        """Learn the run's relays from the coordinator, again and again, until cancelled."""
        assert self._coordinator is not None
        while True:
            try:
                self._client.add_peers(await self._coordinator.relays())
                pause = _DISCOVER_S
            except SourceFault as fault:
                log.warning("can't learn of siblings: %s", fault, extra={"action": "discover"})
                pause = _PAUSE_MAX_S
            await asyncio.sleep(pause)

    async def refetch(self, stored: StoredVersion) -> None:
        """Make a version whole again that was demoted."""
        try:
            await self._begin(stored.manifest, stored.envelope)
        except (SourceFault, DiskFullError, OSError) as error:
            log.warning("can't mend version %d: %s", stored.version, error, extra={"action": "scrub"})

    async def stop(self) -> None:
        """End all transfers; what was verified stays on disk."""
        self.close()
        tasks: list[asyncio.Task[Any]] = [each.task for each in self._incoming.values() if each.task]
        tasks += self._getting_torrent.values()
        tasks += self._packed.tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(self, head: Head) -> None:
        """Begin a version and tell clients. It is filled while the next head is waited for."""
        manifest, envelope = await self._client.manifest(head.version, head.manifest_digest)
        incoming = await self._begin(manifest, envelope)
        self.manners.expect_clients()
        self._raise_head(head)
        if incoming is not None:
            self._begun, self._newest = head.version, incoming.task

    def _knows(self, total: Digest) -> bool:
        return self._closed or self.store.holds(total) or any(each.total == total for each in self._parcels())

    def _parcels(self) -> Iterator[Parcel]:
        incoming = (parcel for each in self._incoming.values() for parcel in each.parcels)
        return itertools.chain(incoming, self._packed.parcels)

    def _may_pull(self, version: int, asker: Asker) -> bool:
        """Whether upstream may be asked for a version on somebody's behalf.

        Never for a sibling, and not for a relay while it is being asked for already: relays that name one another as
        origins would else send each other looking in circles.
        """
        if asker.kind is Kind.PEER or (asker.kind is Kind.RELAY and version in self._pulling):
            return False
        if self._head is None or version > self._head.version or len(self._incoming) >= _MAX_INCOMING:
            return False
        return self._absent.get(version, 0.0) <= self._clock()

    async def _pull_through(self, version: int) -> Incoming | None:
        """Begin a version that a client asks for, if upstream has it."""
        self._pulling[version] += 1
        try:
            manifest, envelope = await self._client.manifest(version)
            self._asked[version] = self._clock()
            return await self._begin(manifest, envelope)
        except (SourceFault, DiskFullError) as error:
            self._absent[version] = self._clock() + _ABSENT_S
            log.warning("can't get version %d: %s", version, error, extra={"action": "pull", "version": version})
            return None
        finally:
            self._pulling[version] -= 1
            if not self._pulling[version]:
                del self._pulling[version]

    async def _begin(self, manifest: Manifest, envelope: SignedEnvelope) -> Incoming | None:
        """The version on its way in, begun if need be; None if it is already whole."""
        version = manifest.policy_version
        async with self._starting:
            if self.store.get(version) is not None:
                return None
            if version in self._incoming:
                return self._incoming[version]
            async with AsyncExitStack() as locked:
                await locked.enter_async_context(self.store.lock(version, manifest_digest(envelope.payload)))
                await self._make_room(manifest)
                partial = await self._open_partial(manifest, envelope)
                incoming = Incoming(partial, self._client, locked.pop_all(), self.changed.beat)
                self._incoming[version] = incoming
            if self._help_peers:
                # Asked for now, so that clients are answered from what is here, and relays never send each other looking.
                self._getting_torrent[version] = asyncio.create_task(self._get_torrent(manifest))
            incoming.task = asyncio.create_task(self._receive(incoming))
            incoming.task.add_done_callback(_note_outcome)
            self.changed.beat()
            return incoming

    async def _get_torrent(self, manifest: Manifest) -> None:
        try:
            torrent = await self._client.torrent(manifest)
            if torrent is not None:
                digest = manifest_digest(manifest.to_json_bytes())
                await asyncio.to_thread(self.store.torrents.put, manifest.policy_version, digest, torrent)
        except (SourceFault, DiskFullError) as error:
            log.warning("no torrent of version %d: %s", manifest.policy_version, error, extra={"action": "torrent"})
        finally:
            del self._getting_torrent[manifest.policy_version]

    async def _open_partial(self, manifest: Manifest, envelope: SignedEnvelope) -> PartialVersion:
        """A full disk costs the older versions, not the newest."""
        try:
            return await asyncio.to_thread(self.store.open_partial, envelope, manifest)
        except DiskFullError:
            if not await asyncio.to_thread(self.store.collect, required=(), keep_last=1):
                raise
        return await asyncio.to_thread(self.store.open_partial, envelope, manifest)

    async def _receive(self, incoming: Incoming) -> StoredVersion:
        begin = self._clock()
        try:
            stored = await incoming.run()
        finally:
            await incoming.close()
            del self._incoming[incoming.version]
            self.changed.beat()
        log.info(
            "version %d is whole after %.1f s",
            stored.version,
            self._clock() - begin,
            extra={"action": "complete", "version": stored.version},
        )
        self.announce(stored)
        await self._collect()
        return stored

    async def _collect(self) -> None:
        """Remove old versions. While a coordinator can't say what is needed, only a lack of room removes any."""
        required = await needed(self._coordinator, self.store)
        if required is not None:
            self._needed = required
            await asyncio.to_thread(
                self.store.collect, required=required, keep_last=self._keep_last, recent=self._recent()
            )

    async def _make_room(self, manifest: Manifest) -> None:
        """Before a version is begun: remove others if it would not fit. Raises DiskFullError if it can't fit.

        What the run needs goes last: it lies at the origin too, and is pulled through again when someone asks.
        """
        if self._max_disk_bytes is None:
            return
        sizes = self.store.sizes
        sizes.update({version: each.partial.manifest.kept_bytes for version, each in self._incoming.items()})
        head = [] if self.store.head is None else [self.store.head.version]
        gone = make_room(
            sizes,
            manifest.kept_bytes,
            self._max_disk_bytes,
            never={*head, *self.store.being_read, *self._incoming},
            last=self._needed,
        )
        if gone is None:
            raise DiskFullError(
                f"version {manifest.policy_version} has {manifest.total_bytes / 2**30:.2f} GiB and does not fit into "
                f"--max-disk-gib {self._max_disk_bytes / 2**30:g} beside what is being read and the newest version: "
                "give more room"
            )
        await asyncio.to_thread(self.store.remove, gone)

    def _recent(self) -> Collection[int]:
        now = self._clock()
        self._asked = {version: at for version, at in self._asked.items() if now - at < _RECENT_S}
        self._absent = {version: until for version, until in self._absent.items() if until > now}
        return sorted(self._asked, key=lambda version: self._asked[version])[-_MAX_INCOMING:]


def _note_outcome(task: asyncio.Task[StoredVersion]) -> None:
    """Nobody may be waiting for a version that a client asked for: its fault is logged here."""
    if not task.cancelled() and task.exception() is not None:
        log.warning("a version didn't become whole: %s", task.exception(), extra={"action": "receive"})
