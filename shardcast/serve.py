"""Runs an origin or a relay until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import UserError
from shardcast.catalog import Catalog
from shardcast.client import ShardcastClient
from shardcast.config import RELAY_LIMITS, ServerLimits, parse_keys, parse_sources
from shardcast.data_dir import serve_alone
from shardcast.discovery import Coordinator
from shardcast.itself import refuse_itself
from shardcast.listen import listening
from shardcast.metrics import ShardcastMetrics
from shardcast.origin import Origin
from shardcast.peer_server import PeerService
from shardcast.quota import MonthlyQuota
from shardcast.relay import RelayCatalog
from shardcast.scrub import Scrubber
from shardcast.server import ShardcastApp
from shardcast.storage import VersionStore
from shardcast.uplink import Uplink

log = logging.getLogger("shardcast")


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """What the operator of a relay chose. URLs and keys as typed."""

    origins: Sequence[str]
    peers: Sequence[str]
    trainer_keys: Sequence[str]
    data_dir: Path
    host: str
    port: int
    keep: int
    coordinator: str | None = None
    max_bandwidth_mbit: float | None = None
    max_disk_gib: float | None = None
    max_connections: int = 1024
    max_connections_per_address: int = 256
    help_peers: bool = True
    monthly_quota_gib: float | None = None


async def serve_origin(
    data_dir: Path,
    trainer_keys: Sequence[str],
    host: str,
    port: int,
    keep: int,
    coordinator: str | None,
    help_peers: bool,
) -> None:
    """Serve a data directory as an origin. Raises UserError for a bad key or URL, a port or directory in use."""
    keys = parse_keys(trainer_keys)
    asked = Coordinator(coordinator) if coordinator else None
    limits = ServerLimits()
    with serve_alone(data_dir):
        store = await asyncio.to_thread(VersionStore, data_dir, keys)
        origin = Origin(store, limits=limits, keep_last=keep, coordinator=asked, help_peers=help_peers)
        async with listening(origin.app, host, port, limits, origin.catalog.metrics.count_refused) as url:
            await _until_stopped(url, origin.catalog, origin.run())


async def serve_relay(options: RelayOptions) -> None:
    """Serve a data directory as a relay. Raises UserError as `serve_origin` does."""
    sources = parse_sources(options.origins)
    keys = parse_keys(options.trainer_keys)
    coordinator = Coordinator(options.coordinator) if options.coordinator else None
    limits = ServerLimits(
        max_connections=options.max_connections,
        max_connections_per_address=options.max_connections_per_address,
        max_requests_per_address=options.max_connections_per_address,
    )
    with serve_alone(options.data_dir):
        metrics = ShardcastMetrics()
        store = await asyncio.to_thread(VersionStore, options.data_dir, keys)
        async with (
            ShardcastClient(
                sources,
                keys,
                options.data_dir,
                peers=options.peers,
                own_id=secrets.token_hex(8),
                limits=RELAY_LIMITS,
                metrics=metrics,
                store=store,
            ) as client,
            _stopping(_relay_catalog(options, store, metrics, client, coordinator)) as catalog,
        ):
            quota = _quota(options, metrics)
            serving = ShardcastApp(catalog, limits, Uplink.from_mbit(options.max_bandwidth_mbit), quota)
            app = serving.build()
            if options.help_peers:
                PeerService(serving).add_to(app)
            async with listening(app, options.host, options.port, limits, metrics.count_refused) as url:
                if url in sources:
                    raise UserError(f"{url} is this relay itself: name an origin or another relay")
                scrubber = Scrubber(store, metrics, catalog.refetch)
                try:
                    itself = refuse_itself(sources, catalog.server_id)
                    await _until_stopped(url, catalog, _relay_work(catalog, coordinator, scrubber, itself))
                finally:
                    if quota is not None:
                        quota.save()


def _quota(options: RelayOptions, metrics: ShardcastMetrics) -> MonthlyQuota | None:
    if options.monthly_quota_gib is None:
        return None
    quota = MonthlyQuota(options.data_dir / "month.json", int(options.monthly_quota_gib * 2**30))
    metrics.show_quota(lambda: quota.left_bytes)
    return quota


def _relay_catalog(
    options: RelayOptions,
    store: VersionStore,
    metrics: ShardcastMetrics,
    client: ShardcastClient,
    coordinator: Coordinator | None,
) -> RelayCatalog:
    return RelayCatalog(
        store,
        metrics,
        client,
        keep_last=options.keep,
        max_disk_bytes=None if options.max_disk_gib is None else int(options.max_disk_gib * 2**30),
        coordinator=coordinator,
        help_peers=options.help_peers,
    )


async def _relay_work(
    catalog: RelayCatalog, coordinator: Coordinator | None, scrubber: Scrubber, itself: Coroutine[Any, Any, None]
) -> None:
    """Work until cancelled. Raises UserError if what the relay fills from is itself."""
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(catalog.follow())
            group.create_task(scrubber.run())
            group.create_task(itself)
            if coordinator is not None:
                group.create_task(catalog.find_siblings())
    except ExceptionGroup as failed:
        mistakes, others = failed.split(UserError)
        if mistakes is None or others is not None:
            raise
        raise mistakes.exceptions[0] from None


async def _until_stopped(url: str, catalog: Catalog, work: Coroutine[Any, Any, None]) -> None:
    """Say that connections are accepted, and work until a signal comes. A failure of the work is raised."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    print(f"ready url={url}", flush=True)
    working = asyncio.create_task(work)
    waiting = asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        log.info("stopping", extra={"action": "stop"})
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)
        catalog.close()


@contextlib.asynccontextmanager
async def _stopping(catalog: RelayCatalog) -> AsyncIterator[RelayCatalog]:
    try:
        yield catalog
    finally:
        await catalog.stop()
