"""Asks the machine and the network, for the checks. Nothing here raises for what it finds: a problem is a sentence."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterable
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import aiohttp

from coordinator.client import Trust
from protocol.errors import RollswarmError
from protocol.manifest import Manifest
from protocol.trust import why_unreachable
from shardcast.client import ShardcastClient
from worker.doctor.checks import Relay

_TIMEOUT_S = 10.0
_SAMPLE_BYTES = 4 << 20
_SAMPLE_S = 5.0


async def resolve(host: str) -> str:
    """Why the host has no address; "" if it has one."""
    try:
        await asyncio.get_running_loop().getaddrinfo(host, None)
    except OSError as error:
        return str(error.strerror or error)
    return ""


async def connect(host: str, port: int) -> str:
    """Why host:port can't be connected to; "" if it can."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), _TIMEOUT_S)
    except TimeoutError:
        return "no answer (blocked?)"
    except OSError as error:
        return error.strerror or str(error)
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        await asyncio.wait_for(writer.wait_closed(), _TIMEOUT_S)
    return ""


async def clock_offset(trust: Trust) -> float | None:
    """Seconds that this machine's clock is ahead of the coordinator's, by the Date of an answer; None if it told none.

    The certificate is not looked at: a wrong clock makes it look expired, and this is to say so.
    """
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{trust.url}/healthz", ssl=False, allow_redirects=False) as response,
        ):
            told = response.headers.get("Date", "")
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None
    try:
        return time.time() - parsedate_to_datetime(told).timestamp()
    except (ValueError, TypeError):
        return None


async def look_at_relays(urls: Iterable[str]) -> list[Relay]:
    """Each relay's answer, and how fast it sends a piece of its newest version."""
    timeout = aiohttp.ClientTimeout(total=4 * _TIMEOUT_S, connect=_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        return list(await asyncio.gather(*(_relay(session, url.rstrip("/")) for url in urls)))


async def _relay(session: aiohttp.ClientSession, url: str) -> Relay:
    try:
        async with session.get(f"{url}/healthz", allow_redirects=False) as response:
            if response.status != 200:
                return Relay(url, f"answers {response.status}: no relay")
            health = await response.json()
        newest = health.get("complete") if isinstance(health, dict) else None
        return Relay(url, version=newest if isinstance(newest, int) and newest >= 0 else None)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        return Relay(url, why_unreachable(error)[:200])


async def newest_manifest(client: ShardcastClient) -> Manifest | None:
    """Of the newest version, its signature checked; None if there is none yet, or nobody tells."""
    try:
        head = await client.head(wait_s=0.0)
        if head is None:
            return None
        manifest, _ = await client.manifest(head.version, head.manifest_digest)
    except (RollswarmError, TimeoutError):
        return None
    return manifest


async def receive_rate(url: str, manifest: Manifest) -> float | None:
    """Bytes per second of one shard from a relay, over a few seconds at most; None if it sends none."""
    shard = max(manifest.shards, key=lambda shard: shard.size, default=None)
    if shard is None:
        return None
    received, begun = 0, time.monotonic()
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3 * _SAMPLE_S)) as session,
            session.get(f"{url}/v1/shards/{shard.digest}", allow_redirects=False) as response,
        ):
            if response.status != 200:
                return None
            async for piece in response.content.iter_chunked(1 << 16):
                received += len(piece)
                if received >= _SAMPLE_BYTES or time.monotonic() - begun > _SAMPLE_S:
                    break
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None
    return received / max(time.monotonic() - begun, 1e-6)


def port_problem(port: int) -> str:
    """Why nothing can listen on a port; "" if something can."""
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def installed(*packages: str) -> str | None:
    """The version of the first of these packages that is installed."""
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            return version(package)
    return None


def torch_sees_gpu() -> bool | None:
    """None without torch."""
    if find_spec("torch") is None:
        return None
    import torch

    return bool(torch.cuda.is_available())
