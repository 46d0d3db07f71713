"""Runs an origin or a relay until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any

from protocol.errors import UserError
from shardcast.bandwidth import Throttle
from shardcast.catalog import Catalog
from shardcast.client import ShardcastClient
from shardcast.config import RELAY_LIMITS, ServerLimits, parse_keys, parse_source, parse_sources
from shardcast.metrics import ShardcastMetrics
from shardcast.origin import Origin
from shardcast.peer_server import PeerService
from shardcast.relay import RelayCatalog
from shardcast.server import ShardcastApp, listening
from shardcast.storage import VersionStore, serve_alone

log = logging.getLogger("shardcast")


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
    coordinator = parse_source(coordinator) if coordinator else None
    limits = ServerLimits()
    with serve_alone(data_dir):
        store = await asyncio.to_thread(VersionStore, data_dir, keys)
        origin = Origin(store, keys, limits=limits, keep_last=keep, coordinator=coordinator, help_peers=help_peers)
        async with listening(origin.app, host, port, limits) as url:
            await _until_stopped(url, origin.catalog, origin.run())


async def serve_relay(
    origins: Sequence[str],
    peers: Sequence[str],
    trainer_keys: Sequence[str],
    data_dir: Path,
    host: str,
    port: int,
    keep: int,
    max_bandwidth_mbit: float | None,
    help_peers: bool,
) -> None:
    """Serve a data directory as a relay. Raises UserError as `serve_origin` does."""
    sources = parse_sources(origins)
    keys = parse_keys(trainer_keys)
    limits = ServerLimits()
    with serve_alone(data_dir):
        metrics = ShardcastMetrics()
        own_id = secrets.token_hex(8)
        store = await asyncio.to_thread(VersionStore, data_dir, keys)
        async with (
            ShardcastClient(
                sources, keys, data_dir, peers=peers, own_id=own_id, limits=RELAY_LIMITS, metrics=metrics, store=store
            ) as client,
            _stopping(
                RelayCatalog(store, metrics, client, keep_last=keep, server_id=own_id, help_peers=help_peers)
            ) as catalog,
        ):
            app = ShardcastApp(catalog, limits, Throttle.from_mbit(max_bandwidth_mbit))
            application = app.build()
            if help_peers:
                PeerService(app).add_to(application)
            async with listening(application, host, port, limits) as url:
                if url in sources:
                    raise UserError(f"{url} is this relay itself: name an origin or another relay")
                await _until_stopped(url, catalog, catalog.follow())


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
