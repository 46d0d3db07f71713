"""Fills a partial version from peers and servers together.

Loops: `_take` asks each server again and again for a shard that no peer has yet (the server gives each shard to one
client) and hands its pieces to libtorrent, which writes them and offers them to the peers; `_verify` hashes each shard
from disk once libtorrent has all its pieces, and only then does it count. When the peers bring nothing for `stall_s`, or
much less than a server would (`judge`), everything that is missing is asked of the servers, whoever seems to have it; a
shard that one server takes very long for is asked of others. So peers and servers can be useless or slow without holding
anybody up.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets

from protocol.errors import SourceFault
from protocol.manifest import Shard
from shardcast import bits
from shardcast.bandwidth import RateMeter, Throttle
from shardcast.config import SwarmLimits
from shardcast.filling import Filling
from shardcast.partial import hash_range
from shardcast.pulse import Pulse
from shardcast.reliance import Reliance, are_slow, judge
from shardcast.selection import slice_of
from shardcast.sources import Misbehaved, Source, Unknown
from shardcast.storage import ShardLocation
from shardcast.swarm import Member
from shardcast.transfer import in_thread

log = logging.getLogger("shardcast")

_IDLE_S = 0.25
_LOOK_S = 0.1  # what peers have is looked at this often at most
_WAIT_S = 1.0  # how long a server may hold the question for a shard of its own share
_SHARE_S = 0.5
_SLOW = 4.0  # times as long as expected: then a shard is asked of another server as well
_TRIES = 3  # wrong hashes of one shard on disk, after which peers are left alone


class PeersUseless(SourceFault):
    """The version can't be had this way: no server helps, nothing comes, or libtorrent gave up. The plain way is open."""


class _Overtaken(Exception):
    """The shard came otherwise, and the rest of this answer is not needed."""


class SwarmDownload:
    """One run that fills one partial version; like `download.Download` for those who watch it."""

    def __init__(
        self,
        filling: Filling,
        member: Member,
        piece_hashes: bytes,
        limits: SwarmLimits,
    ) -> None:
        self._partial = partial = filling.partial
        self._member = member
        self._hashes = piece_hashes
        self._pool = filling.pool
        self._limits = limits
        self._store = filling.store
        self._on_shard = filling.on_shard
        self._on_bytes = filling.on_bytes
        self._throttle = filling.throttle
        self._metrics = filling.metrics
        self._clock = filling.clock
        self._shards = partial.manifest.shards
        self._pieces = member.layout.pieces_of(self._shards)
        self._shard_of = {piece: index for index, pieces in enumerate(self._pieces) for piece in pieces}
        self._waiting = {index: set(self._pieces[index]) for index in partial.missing}
        self._taken = 0  # shards that come, or came, from a server; their pieces may still be on the way to the disk
        self._coming: dict[tuple[str, int], float] = {}  # servers and the shards that they send, and since when
        self._ours: set[int] = set()  # pieces that came from a server
        self._whole: asyncio.Queue[int] = asyncio.Queue()  # shards whose pieces are all on disk
        self._tries = dict.fromkeys(partial.missing, 0)
        self._unhelpful: set[str] = set()  # servers that know nothing of peers
        self._ids: dict[str, str] = {}  # servers by URL → what they call themselves
        self._widened: set[str] = set()  # servers that had nothing of their share: asked for any, the next time
        self._lone = 0  # shards that no connected peer has a piece of
        self._looked_at = -1.0
        self._from_servers = 0  # bytes
        self._name = secrets.token_hex(8)
        self._pulse = Pulse()
        self._from_peers = RateMeter(limits.patience_s / 2)
        self._begun = self._last_byte = self._last_peer_piece = self._served = self._clock()

    async def run(self) -> None:
        """Return when every shard is verified. Raises PeersUseless."""
        self._begun = self._last_byte = self._last_peer_piece = self._served = self._clock()
        self._member.on_piece = self._on_piece
        self._member.on_wrong = self._on_wrong
        try:
            async with asyncio.TaskGroup() as group:
                helpers = [group.create_task(self._copy_locals())]
                if self._throttle is not None:
                    helpers.append(group.create_task(self._share(self._throttle)))
                for source in self._pool.sources.values():
                    helpers += [group.create_task(self._take_from(source)) for _ in range(self._limits.per_source)]
                verifiers = [group.create_task(self._verify()) for _ in range(2)]
                await self._until_whole()
                for task in (*helpers, *verifiers):
                    task.cancel()
        except BaseExceptionGroup as group_error:
            raise _first_leaf(group_error) from None
        finally:
            self._member.on_piece = self._member.on_wrong = None

    async def _until_whole(self) -> None:
        received = 0
        while len(self._partial.have) < len(self._shards):
            if self._member.error is not None:
                raise PeersUseless(f"libtorrent gave up: {self._member.error}")
            if len(self._unhelpful) == len(self._pool.sources):
                raise PeersUseless("no source helps peers")
            now = self._member.received()
            if now > received:  # of pieces that are not whole, too
                self._last_byte = self._clock()
                self._from_peers.add(now - received, self._last_byte)
                received = now
            self._free_slow()
            self._check_patience()
            await self._pulse.wait_until(lambda: len(self._partial.have) == len(self._shards), _IDLE_S)

    def _check_patience(self) -> None:
        """Raise PeersUseless if nothing comes, or servers are needed and bring nothing this way."""
        now, patience = self._clock(), self._limits.give_up_s
        if now - self._last_byte > patience:
            raise PeersUseless(f"no byte came for {patience:.0f} s: {self._pool.report()}")
        if not self._needs_servers(now):
            self._served = now
        elif now - self._served > patience:
            raise PeersUseless(
                f"peers are slow, and no server sent a shard for {patience:.0f} s: {self._pool.report()}"
            )

    def _needs_servers(self, now: float) -> bool:
        """Whether peers are too slow by the measure of any server that could be asked. That one is probed is not enough."""
        for url, stats in self._pool.stats.items():
            if url in self._unhelpful or not stats.is_ready(now):
                continue
            reliance = self._reliance(url)
            if reliance is Reliance.SERVER:
                return True
            if reliance is Reliance.PROBE and are_slow(
                self._from_peers.rate(now), left=self._left, limits=self._limits
            ):
                return True
        return False

    # From the servers

    async def _take_from(self, source: Source) -> None:
        while source.url not in self._unhelpful:
            stats = self._pool.stats[source.url]
            wanted = self._wanted(source)
            if not wanted or not stats.is_ready(self._clock()):
                await self._pulse.wait_until(lambda: False, _IDLE_S)
                continue
            try:
                await self._take(source, wanted)
            except Unknown as fault:
                log.info("%s", fault, extra={"action": "next_shard", "source": source.url})
                self._unhelpful.add(source.url)
            except SourceFault as fault:
                self._pool.failed(source, fault)

    async def _take(self, source: Source, wanted: int) -> None:
        """Ask a server for one of the wanted shards, and hand its pieces on as they come."""
        version, asked = self._member.version, self._clock()
        with self._pool.in_flight(source):
            async with source.next_shard(version, wanted, len(self._shards), _WAIT_S, self._name) as offer:
                self._ids[source.url] = offer.server_id
                if offer.index is None:
                    if (
                        source.url in self._widened
                    ):  # it had nothing at all: not asked again before it would have waited
                        await asyncio.sleep(max(0.0, asked + _WAIT_S - self._clock()))
                    self._widened.add(source.url)
                    return
                self._widened.discard(source.url)
                index, shard = offer.index, self._shards[offer.index]
                if not bits.has(wanted, index):
                    raise Misbehaved(f"{source.url}: gives shard {index}, which was not asked for")
                if bits.has(self._taken, index):
                    return  # two questions were answered alike: the connection is dropped before the bytes come twice
                self._taken |= 1 << index
                begin = self._clock()  # from here on it is the server's pace, not its patience
                self._coming[source.url, index] = begin
                try:
                    feed = Feed(self._pieces[index], shard.size, self._member.layout.piece_bytes)
                    await offer.read(shard.size, lambda chunks: self._feed(source, feed, index, chunks))
                except _Overtaken:
                    return
                except BaseException:
                    if (source.url, index) in self._coming:  # else it is another server's by now
                        self._taken &= ~(1 << index)
                    raise
                finally:
                    self._coming.pop((source.url, index), None)
        seconds = self._clock() - begin
        self._pool.succeeded(source, shard.size, seconds)
        if self._metrics:
            self._metrics.shard_seconds.observe(seconds)

    async def _feed(self, source: Source, feed: Feed, index: int, chunks: list[bytes]) -> None:
        if index not in self._waiting:
            raise _Overtaken
        self._last_byte = self._served = self._clock()
        for piece, data in feed.take(chunks):
            data = self._member.layout.padded(piece, data)
            if await asyncio.to_thread(_sha1, data) != self._hashes[20 * piece : 20 * piece + 20]:
                raise Misbehaved(f"{source.url}: served wrong bytes for piece {piece}")
            self._ours.add(piece)
            self._member.add_piece(piece, data)
        count = sum(map(len, chunks))
        self._from_servers += count
        if self._metrics:
            self._metrics.count_received("relay", count)
        if self._throttle:
            await self._throttle.take(count)

    def _wanted(self, source: Source) -> int:
        """What to ask of a server: shards that no peer has, of the server's own share first."""
        self._look()
        missing = bits.of(self._waiting) & ~self._taken
        reliance = self._reliance(source.url)
        probing = reliance is Reliance.PROBE and not self._pool.stats[source.url].in_flight
        wanted = missing if probing or reliance is Reliance.SERVER else missing & self._lone
        own_id = self._ids.get(source.url)
        if own_id is None or source.url in self._widened:
            return wanted
        return wanted & slice_of(self._ids.values(), own_id, len(self._shards)) or wanted

    def _reliance(self, url: str) -> Reliance:
        now = self._clock()
        if now - self._last_peer_piece > self._limits.stall_s:
            return Reliance.SERVER
        return judge(
            self._from_peers.rate(now),
            self._pool.stats[url].throughput,
            left=self._left,
            elapsed_s=now - self._begun,
            limits=self._limits,
        )

    @property
    def _left(self) -> int:
        """Bytes of pieces that are missing."""
        return sum(map(len, self._waiting.values())) * self._member.layout.piece_bytes

    def _free_slow(self) -> None:
        """Let shards that come very slowly be asked of other servers as well."""
        now = self._clock()
        best = max((stats.throughput or 0.0 for stats in self._pool.stats.values()), default=0.0)
        for (url, index), begun in list(self._coming.items()):
            expected = self._shards[index].size / best if best else self._limits.patience_s
            if now - begun > max(self._limits.patience_s, _SLOW * expected):
                del self._coming[url, index]
                self._taken &= ~(1 << index)

    def _look(self) -> None:
        """Which shards no connected peer has a piece of; looked at now and then."""
        now = self._clock()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        available = self._member.availability() or [0] * self._member.layout.pieces
        self._lone = bits.of(
            index for index in self._waiting if not any(available[piece] for piece in self._pieces[index])
        )

    async def _copy_locals(self) -> None:
        """Files that don't change between versions are copied from a version that is already here."""
        if self._store is None:
            return
        here = {index: self._store.locate(self._shards[index].digest) for index in sorted(self._waiting)}
        local = {index: location for index, location in here.items() if location is not None}
        self._taken |= bits.of(local)
        for index, location in local.items():
            try:
                with self._store.reading(location.version):
                    data = await in_thread(_read_right, location, self._shards[index])
            except OSError:
                self._taken &= ~(1 << index)
                continue  # the version went away
            size = self._member.layout.piece_bytes
            for number, piece in enumerate(self._pieces[index]):
                self._ours.add(piece)
                own = data[number * size : (number + 1) * size]
                self._member.add_piece(piece, self._member.layout.padded(piece, own))

    # From the peers

    async def _share(self, throttle: Throttle) -> None:
        """Keep peers and servers together under the cap: peers get what servers leave, and servers wait for both."""
        received = self._member.received()
        from_servers = 0
        while True:
            rate = (self._from_servers - from_servers) / _SHARE_S
            from_servers = self._from_servers
            self._member.limit_download(max(throttle.bytes_per_s / 8, throttle.bytes_per_s - rate))
            await asyncio.sleep(_SHARE_S)
            now = self._member.received()
            throttle.charge(now - received)
            received = now

    def _on_piece(self, piece: int) -> None:
        index = self._shard_of[piece]
        waiting = self._waiting.get(index)
        if waiting is None or piece not in waiting:
            return
        waiting.remove(piece)
        now = self._clock()
        self._last_byte = now
        if piece not in self._ours:
            self._last_peer_piece = now
        if not waiting:
            del self._waiting[index]
            self._whole.put_nowait(index)
        if self._on_bytes:
            at = (piece - self._pieces[index].start) * self._member.layout.piece_bytes
            self._on_bytes(min(self._member.layout.piece_bytes, self._shards[index].size - at))
        self._pulse.beat()

    def _on_wrong(self, piece: int) -> None:
        """What a server sent of this piece was mixed with a peer's rubbish, and is gone with it."""
        self._ours.discard(piece)
        self._taken &= ~(1 << self._shard_of[piece])

    # What came

    async def _verify(self) -> None:
        """Hash each whole shard from disk. One that is wrong (bytes not yet written, or a broken disk) is tried again."""
        while True:
            index = await self._whole.get()
            shard = self._shards[index]
            digest = await in_thread(hash_range, self._partial.path_of(index), shard.offset, shard.size)
            if self._partial.commit(index, digest):
                if self._on_shard:
                    self._on_shard(index)
                self._pulse.beat()
                continue
            self._tries[index] += 1
            if self._tries[index] >= _TRIES:
                raise PeersUseless(f"shard {index} is wrong on disk, though its pieces were right")
            self._member.flush()
            await asyncio.sleep(_IDLE_S)
            self._whole.put_nowait(index)


class Feed:
    """Cuts a shard's bytes into its pieces as they come."""

    def __init__(self, pieces: range, size: int, piece_bytes: int) -> None:
        self._pieces = iter(pieces)
        self._left = size
        self._piece_bytes = piece_bytes
        self._held: list[bytes] = []
        self._size = 0

    def take(self, chunks: list[bytes]) -> list[tuple[int, bytes]]:
        """The pieces that are whole now. Never more bytes come than the shard has: the source saw to it."""
        self._held += chunks
        self._size += sum(map(len, chunks))
        whole = []
        due = min(self._piece_bytes, self._left)
        if self._size < due:
            return []
        joined = memoryview(b"".join(self._held))
        while due and len(joined) >= due:
            whole.append((next(self._pieces), bytes(joined[:due])))
            joined = joined[due:]
            self._left -= due
            due = min(self._piece_bytes, self._left)
        self._held, self._size = [bytes(joined)], len(joined)
        return whole


def _sha1(data: bytes) -> bytes:
    return hashlib.sha1(data).digest()


def _read_right(location: ShardLocation, shard: Shard) -> bytes:
    """The bytes of a shard that lies here. Raises OSError if they can't be read or are wrong."""
    with location.path.open("rb") as file:
        file.seek(location.offset)
        data = file.read(location.size)
    if hashlib.sha256(data).digest() != shard.digest.raw:
        raise OSError(f"{location.path} doesn't have the bytes that it should have")
    return data


def _first_leaf(group: BaseExceptionGroup) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
