"""A client's side of swapping versions: joins their swarms, fills from them, and goes on seeding what is whole.

Loops: `_meet`, one per version and server, tells the server where this client is and calls the peers that it names, as
long as the version is swapped; `_tend` leaves the swarms of versions that were removed, or can't be read any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from protocol.errors import OurFault, SourceFault
from protocol.manifest import Manifest
from shardcast.blob_manifest import swapped
from shardcast.config import SwarmLimits
from shardcast.filling import Filling
from shardcast.pool import SourcePool
from shardcast.sources import NotYet, Source, Unknown
from shardcast.storage import StoredVersion, VersionStore
from shardcast.swarm import Member, Swarm
from shardcast.swarm_download import PeersUseless, SwarmDownload
from shardcast.torrent import InvalidTorrent, Layout

log = logging.getLogger("shardcast")

_TEND_S = 2.0
_SEEDS_RARER = 4  # who has everything announces itself so many times more rarely
_TORRENT_TRIES = 8
_TORRENT_PAUSE_S = 0.25


class Peering:
    """Over one `Swarm`; used from one event loop."""

    def __init__(self, swarm: Swarm, store: VersionStore, limits: SwarmLimits) -> None:
        self._swarm = swarm
        self._store = store
        self._limits = limits
        self._meetings: dict[int, list[asyncio.Task[None]]] = {}
        self._seeding: dict[int, Member] = {}
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._tending: asyncio.Task[None] | None = None

    @property
    def versions(self) -> list[int]:
        """The versions that are swapped now, ascending."""
        return sorted(member.version for member in self._swarm.members)

    async def fill(self, filling: Filling) -> bool:
        """Fill a version together with peers; False if that can't be done (what came stays, and counts).

        Raises OurFault. Afterwards nobody but the caller writes into the version's files.
        """
        partial, pool = filling.partial, filling.pool
        layout = Layout.of(partial.manifest)
        torrent = None if layout is None else await find_torrent(partial.manifest, layout, pool)
        if layout is None or torrent is None:
            return False
        have = [False] * layout.pieces
        for pieces in layout.pieces_of([partial.manifest.shards[index] for index in partial.have]):
            have[pieces.start : pieces.stop] = [True] * len(pieces)
        await self.drop(partial.manifest.policy_version)
        try:
            member = self._join(partial.manifest, layout, torrent, pool, partial.folder, have)
        except OurFault as error:
            log.warning("going on without peers: %s", error, extra={"action": "peers"})
            return False
        run = SwarmDownload(filling, member, layout.hashes_in(torrent), self._limits)
        try:
            await run.run()
        except PeersUseless as fault:
            log.warning("going on without peers: %s", fault, extra={"action": "peers", "version": member.version})
            await asyncio.shield(self._leave(member))
            return False
        except BaseException:
            await asyncio.shield(self._leave(member))
            raise
        self._seeding[member.version] = member
        return True

    def seed(self, stored: StoredVersion, pool: SourcePool) -> None:
        """A version is whole, and lies where it stays: offer it to peers from now on, also if it came another way."""
        member = self._seeding.get(stored.version)
        if member is not None:
            folder = self._folder(stored)
            if folder is not None:
                member.moved_to(folder)
        elif stored.version not in self._starting:
            task = self._starting[stored.version] = asyncio.create_task(self._begin_seeding(stored, pool))
            task.add_done_callback(lambda _: self._starting.pop(stored.version, None))
        if self._tending is None:
            self._tending = asyncio.create_task(self._tend())

    async def drop(self, version: int) -> None:
        """Take no more part in a version. Raises OurFault."""
        starting = self._starting.pop(version, None)
        if starting is not None:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        member = self._seeding.pop(version, None)
        if member is not None:
            await self._leave(member)

    async def close(self) -> None:
        """Leave all swarms."""
        tasks = [task for tasks in self._meetings.values() for task in tasks]
        tasks += self._starting.values()
        if self._tending is not None:
            tasks.append(self._tending)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._meetings.clear()
        self._seeding.clear()
        await self._swarm.close()

    async def _begin_seeding(self, stored: StoredVersion, pool: SourcePool) -> None:
        content = swapped(stored.manifest)
        layout = Layout.of(content)
        torrent = None if layout is None else await find_torrent(content, layout, pool)
        folder = self._folder(stored)
        if layout is None or torrent is None or folder is None or self._store.get(stored.version) is None:
            return
        try:
            have = [True] * layout.pieces
            member = self._join(content, layout, torrent, pool, folder, have)
            self._seeding[stored.version] = member
        except OurFault as error:
            log.warning("not seeding: %s", error, extra={"action": "seed", "version": stored.version})

    def _folder(self, stored: StoredVersion) -> Path | None:
        """Where what is swapped of a version lies, if it is here."""
        if stored.manifest.packed is None:
            return stored.path
        packed = self._store.packed.path(stored.version)
        return None if packed is None else packed.parent

    def _join(
        self,
        manifest: Manifest,
        layout: Layout,
        torrent: bytes,
        pool: SourcePool,
        folder: Path,
        have: list[bool],
    ) -> Member:
        paths = [file.path for file in manifest.files]
        member = self._swarm.join(layout, torrent, paths, folder, have)
        self._meetings[member.version] = [
            asyncio.create_task(self._meet(member, source, pool)) for source in pool.sources.values()
        ]
        return member

    async def _leave(self, member: Member) -> None:
        meetings = self._meetings.pop(member.version, [])
        for task in meetings:
            task.cancel()
        await asyncio.gather(*meetings, return_exceptions=True)
        await self._swarm.leave(member)

    async def _meet(self, member: Member, source: Source, pool: SourcePool) -> None:
        while True:
            pause = 1.0
            try:
                found = await source.peers(member.version, self._swarm.port)
                member.connect(found.endpoints)
                pause = found.again_s * (_SEEDS_RARER if member.version in self._seeding else 1)
            except NotYet:
                pass
            except Unknown:
                return
            except SourceFault as fault:
                pool.failed(source, fault)
                pause = 5.0
            await asyncio.sleep(pause)

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(_TEND_S)
            for version in [
                each for each, member in self._seeding.items() if member.error or not self._store.get(each)
            ]:
                with contextlib.suppress(OurFault):
                    await self.drop(version)


async def find_torrent(manifest: Manifest, layout: Layout, pool: SourcePool) -> bytes | None:
    """The manifest's torrent from the first source that has the right one; None if it names none or nobody has it."""
    if manifest.torrent_info_hash is None:
        return None
    for _ in range(_TORRENT_TRIES):
        later = False
        for source in pool.usable():
            try:
                torrent = await source.torrent(manifest.policy_version, layout.torrent_size)
                layout.check(torrent, manifest.torrent_info_hash)
                return torrent
            except NotYet:
                later = True
            except Unknown:
                continue
            except InvalidTorrent as fault:
                log.warning("%s: %s", source.url, fault, extra={"action": "torrent", "source": source.url})
            except SourceFault as fault:
                pool.failed(source, fault)
        if not later:
            return None
        await asyncio.sleep(_TORRENT_PAUSE_S)
    return None
