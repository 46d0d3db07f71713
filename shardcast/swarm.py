"""Swapping a version's pieces with other clients by BitTorrent (libtorrent).

Private and small: no DHT, no local discovery, no port mapping, no peer exchange; peers come from the run's servers alone
(`peering`), and a torrent is the one whose info-hash the trainer signed. Peers are believed nothing: libtorrent hashes
each piece before it counts and drops who sent a wrong one, and each shard is hashed again by `swarm_download`.
libtorrent is the only writer of a version that it fills, straight into the version's own folder: files are called by
the manifest's checked paths, never by names from a torrent.

A client that can't be reached still connects out, and sends and receives over those connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.errors import OurFault, UserError
from shardcast.peer_book import Endpoint
from shardcast.torrent import Layout

if TYPE_CHECKING:
    import libtorrent

log = logging.getLogger("shardcast")

DEFAULT_PORT = 8611
_PUMP_S = 0.5
_GONE_S = 10.0
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class SwarmConfig:
    """`port` 0: accept no connections, only make them. Rates in 10^6 bits per second, None for no limit."""

    port: int = DEFAULT_PORT
    max_upload_mbit: float | None = None
    connections: int = 60
    uploads: int = 4  # peers sent to at a time: few have each piece soon and pass it on, not all of them late


class Member:
    """This client's part in one version's swarm.

    `on_piece` is called in the event loop for each piece that is right and on disk, `on_wrong` for one that was whole
    and wrong, since a peer sent rubbish; it is fetched again.
    """

    def __init__(
        self, handle: libtorrent.torrent_handle, layout: Layout, add_flags: int, reset_path: libtorrent.move_flags_t
    ) -> None:
        self.layout = layout
        self.on_piece: Callable[[int], None] | None = None
        self.on_wrong: Callable[[int], None] | None = None
        self.error: str | None = None
        self.failed = asyncio.Event()
        self.flushed = asyncio.Event()
        self.gone = asyncio.Event()
        self.handle = handle
        self._add_flags = add_flags
        self._reset_path = reset_path

    @property
    def version(self) -> int:
        return self.layout.version

    def connect(self, endpoints: Collection[Endpoint]) -> None:
        """Call these peers; those that are connected already are left alone."""
        for endpoint in endpoints:
            self.handle.connect_peer((endpoint.address, endpoint.port))

    def add_piece(self, piece: int, data: bytes) -> None:
        """Write a piece that came another way, over what peers sent of it, and offer it to them. `data` must be right."""
        self.handle.add_piece(piece, data, self._add_flags)

    def flush(self) -> None:
        """Have what is held in memory written to disk."""
        self.handle.flush_cache()

    def availability(self) -> list[int]:
        """How many connected peers have each piece."""
        return self.handle.piece_availability()

    def moved_to(self, folder: Path) -> None:
        """The folder was renamed."""
        self.handle.move_storage(str(folder), self._reset_path)
        self.handle.clear_error()
        self.handle.resume()
        self.error = None

    def received(self) -> int:
        """Payload bytes that came from peers so far."""
        return int(self.handle.status().total_payload_download)

    def limit_download(self, bytes_per_s: float) -> None:
        """Take no more than so much from peers."""
        self.handle.set_download_limit(max(1, int(bytes_per_s)))


class Swarm:
    """One libtorrent session, used from one event loop. No socket is opened before the first `join`."""

    def __init__(self, config: SwarmConfig) -> None:
        """Raises UserError if libtorrent is not installed."""
        self._config = config
        self._lt = _import_libtorrent()
        self._session: libtorrent.session | None = None
        self._members: dict[str, Member] = {}
        self._pump_task: asyncio.Task[None] | None = None
        self._bell: tuple[socket.socket, socket.socket] | None = None
        self._ring = asyncio.Event()

    @property
    def port(self) -> int | None:
        """Where peers reach this client, once it has joined a swarm; None if they can't."""
        if self._session is None or not self._config.port:
            return None
        return self._session.listen_port() or None

    @property
    def members(self) -> list[Member]:
        """The versions that are swapped now."""
        return list(self._members.values())

    def join(self, layout: Layout, torrent: bytes, paths: Sequence[str], folder: Path, have: Sequence[bool]) -> Member:
        """Take part in a version's swarm.

        `paths`: the manifest's paths in its order, below `folder`, where every file exists at its full size. `have`:
        which pieces are right already; they are taken at their word. The torrent must have passed `Layout.check`.
        Raises OurFault.
        """
        lt, session = self._lt, self._opened()
        parameters = lt.load_torrent_buffer(torrent)
        parameters.save_path = str(folder)
        parameters.renamed_files = {at: paths[place] for at, place in layout.places().items()}
        parameters.have_pieces = list(have)
        flags = lt.torrent_flags
        parameters.flags = (
            flags.no_verify_files | flags.disable_dht | flags.disable_lsd | flags.disable_pex | flags.duplicate_is_error
        )
        try:
            handle = session.add_torrent(parameters)
        except RuntimeError as error:
            raise OurFault(f"libtorrent refuses version {layout.version}: {error}") from error
        member = Member(
            handle, layout, lt.add_piece_flags_t.overwrite_existing, lt.move_flags_t.reset_save_path_unchecked
        )
        self._members[str(handle.info_hashes().v1)] = member
        return member

    async def leave(self, member: Member) -> None:
        """Stop taking part; when this returns, libtorrent writes and reads this version's files no more.

        Raises OurFault if it doesn't let go.
        """
        key = next((key for key, each in self._members.items() if each is member), None)
        if key is None or self._session is None:
            return
        member.flushed.clear()
        member.handle.pause()
        member.flush()
        try:
            async with asyncio.timeout(_GONE_S):
                await member.flushed.wait()
                self._session.remove_torrent(member.handle)
                await member.gone.wait()
        except TimeoutError:
            raise OurFault("libtorrent didn't let go of a torrent") from None
        finally:
            self._members.pop(key, None)

    async def close(self) -> None:
        """End the session and its sockets."""
        if self._pump_task is not None:
            self._pump_task.cancel()
            await asyncio.gather(self._pump_task, return_exceptions=True)
        sessions = [] if self._session is None else [self._session]
        self._session = self._pump_task = None
        self._members.clear()
        if sessions:
            await asyncio.to_thread(sessions.clear)  # dropping the last reference waits for libtorrent's threads
        if self._bell is not None:  # only now does nobody ring any more
            asyncio.get_running_loop().remove_reader(self._bell[0])
            for end in self._bell:
                end.close()
            self._bell = None

    def _opened(self) -> libtorrent.session:
        if self._session is None:
            loop = asyncio.get_running_loop()
            self._session = self._lt.session(session_settings(self._config, self._lt), 0)
            self._session.add_extension(self._lt.create_smart_ban_plugin)
            # Through a socket, not a callback: libtorrent calls it with a lock that `pop_alerts` takes as well, and a
            # callback would wait for the interpreter's lock, which the caller of `pop_alerts` holds.
            self._bell = socket.socketpair()
            for end in self._bell:
                end.setblocking(False)
            self._session.set_alert_fd(self._bell[1].fileno())
            loop.add_reader(self._bell[0], self._on_bell)
            self._pump_task = loop.create_task(self._pump())
        return self._session

    def _on_bell(self) -> None:
        assert self._bell is not None
        with contextlib.suppress(BlockingIOError):
            self._bell[0].recv(4096)
        self._ring.set()

    async def _pump(self) -> None:
        """Hand alerts on, as they come."""
        while self._session is not None:
            self._ring.clear()
            for alert in self._session.pop_alerts():
                self._on_alert(alert)
            try:
                async with asyncio.timeout(_PUMP_S):
                    await self._ring.wait()
            except TimeoutError:
                continue

    def _on_alert(self, alert: Any) -> None:
        lt = self._lt
        if isinstance(alert, lt.listen_failed_alert):
            log.warning("peers can't reach this client: %s", alert.message(), extra={"action": "peer_listen"})
            return
        if isinstance(alert, lt.torrent_removed_alert):
            member = self._members.get(str(alert.info_hashes.v1))
            if member is not None:
                member.gone.set()
            return
        known = (
            lt.piece_finished_alert,
            lt.hash_failed_alert,
            lt.cache_flushed_alert,
            lt.file_error_alert,
            lt.torrent_error_alert,
        )
        if not isinstance(alert, known) or not alert.handle.is_valid():
            return
        member = self._members.get(str(alert.handle.info_hashes().v1))
        if member is None:
            return
        if isinstance(alert, lt.piece_finished_alert):
            if member.on_piece is not None:
                member.on_piece(alert.piece_index)
        elif isinstance(alert, lt.hash_failed_alert):
            if member.on_wrong is not None:
                member.on_wrong(alert.piece_index)
        elif isinstance(alert, lt.cache_flushed_alert):
            member.flushed.set()
        else:
            member.error = alert.message()
            member.failed.set()


def session_settings(config: SwarmConfig, lt: Any) -> dict[str, Any]:
    """libtorrent's settings: everything off that would find peers or be found in other ways; everything bounded."""
    listening = bool(config.port)
    return {
        "user_agent": "rollswarm-shardcast/1",
        "listen_interfaces": f"0.0.0.0:{config.port},[::]:{config.port}" if listening else "",
        "enable_dht": False,
        "enable_lsd": False,
        "enable_upnp": False,
        "enable_natpmp": False,
        "enable_incoming_tcp": listening,
        "enable_outgoing_tcp": True,
        "enable_incoming_utp": False,
        "enable_outgoing_utp": False,
        # The bytes are public to the run and proven by hashes: enciphering them would only cost processor time.
        "in_enc_policy": int(lt.enc_policy.disabled),
        "out_enc_policy": int(lt.enc_policy.disabled),
        "allow_multiple_connections_per_ip": True,  # a household, or an institute, behind one address
        "connections_limit": config.connections,
        "max_peerlist_size": 4 * config.connections,
        "unchoke_slots_limit": config.uploads,
        "unchoke_interval": 4,  # seconds: a version is swapped in less than one turn of the default, 15
        "optimistic_unchoke_interval": 8,
        "connection_speed": 50,
        "torrent_connect_boost": 50,
        "min_reconnect_time": 2,
        "max_failcount": 10,
        "peer_connect_timeout": 7,
        "request_timeout": 10,
        "piece_timeout": 10,
        "max_queued_disk_bytes": 8 * _MIB,
        "send_buffer_watermark": 1 * _MIB,
        "max_allowed_in_request_queue": 500,
        "max_metadata_size": 64 * _MIB,
        "file_pool_size": 64,
        "aio_threads": 2,
        "hashing_threads": 1,
        "active_downloads": -1,
        "active_seeds": -1,
        "active_limit": -1,
        "upload_rate_limit": _bytes_per_s(config.max_upload_mbit),
        "alert_queue_size": 100_000,
        "alert_mask": lt.alert_category.error
        | lt.alert_category.status
        | lt.alert_category.storage
        | lt.alert_category.piece_progress,
    }


def _bytes_per_s(mbit: float | None) -> int:
    return 0 if mbit is None else max(1, int(mbit * 1e6 / 8))


def _import_libtorrent() -> Any:
    try:
        import libtorrent
    except ImportError as error:
        raise UserError(f"libtorrent is not usable ({error}): `pip install libtorrent`, or leave out --peers") from None
    return libtorrent
