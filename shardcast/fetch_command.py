"""`shardcast fetch` and `shardcast status`, as a person sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from protocol.errors import SourceFault, UserError
from protocol.manifest import Digest, InvalidManifest, manifest_digest
from protocol.trust import why_unreachable
from shardcast.client import Progress, ShardcastClient
from shardcast.config import ClientLimits, parse_source
from shardcast.progress import shown
from shardcast.status_page import amount, text_of
from shardcast.swarm import Swarm, SwarmConfig

_STATUS_TIMEOUT_S = 10.0
_RATES = {
    "behind_s": ("behind", "s"),
    "mbytes_per_s_out": ("sent now", "MB/s"),
    "mbytes_per_s_in": ("received now", "MB/s"),
}
_AMOUNTS = {"bytes_sent": "sent", "quota_left_bytes": "quota left"}


async def run(
    sources: Sequence[str],
    trainer_keys: Sequence[str],
    out: Path,
    version: int | None,
    digest: str | None,
    *,
    max_mbit: float | None = None,
    deadline_s: float = 120.0,
    peer_port: int | None = None,
) -> None:
    """Fetch a version into `out` and print its folder; `peer_port` None is without peers. Raises UserError, SourceFault."""
    expected = _digest(digest)
    limits = ClientLimits(deadline_s=deadline_s)
    swarm = None if peer_port is None else Swarm(SwarmConfig(peer_port, max_mbit))
    async with ShardcastClient(sources, trainer_keys, out, limits=limits, max_mbit=max_mbit, swarm=swarm) as client:
        if version is None:
            head = await client.head(wait_s=deadline_s)
            if head is None:
                raise SourceFault(f"no version was published within {deadline_s:.0f} s")
            version = head.version
        manifest, envelope = await client.manifest(version, expected)
        with shown(f"version {version}", manifest.total_bytes) as on_progress:
            way = "none"  # it was here already

            def note(progress: Progress) -> None:
                nonlocal way
                way = progress.way.value
                on_progress(progress)

            path = await client.fetch(version, expected, note)
    facts = f"version={version} digest={manifest_digest(envelope.payload)} bytes={manifest.total_bytes}"
    print(f"{facts} way={way} path={path}")


async def show_status(url: str) -> None:
    """Print a server's `/healthz` line by line. Raises UserError, SourceFault."""
    base = parse_source(url)
    timeout = aiohttp.ClientTimeout(total=_STATUS_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{base}/healthz", allow_redirects=False) as response,
        ):
            if response.status != 200:
                raise SourceFault(f"{base} answers {response.status}; is it an origin or a relay?")
            health = json.loads(await response.content.read(2**20))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise SourceFault(f"{base} can't be asked: {why_unreachable(error)}") from error
    if not isinstance(health, dict):
        raise SourceFault(f"{base} doesn't answer like an origin or a relay")
    for line in status_lines(health):
        print(line)


def status_lines(health: Mapping[str, Any]) -> Iterator[str]:
    """What a server says of itself, for a person. It may say anything; nothing of it moves the terminal's cursor."""
    for line in _lines(health):
        yield "".join(each if each.isprintable() else " " for each in line)


def _lines(health: Mapping[str, Any]) -> Iterator[str]:
    for key, value in health.items():
        if key in _RATES:
            name, unit = _RATES[key]
            text = f"{value} {unit}" if key != "behind_s" or health.get("following", True) else "unknown"
        elif key in _AMOUNTS and isinstance(value, int) and 0 <= value < 2**63:
            name, text = _AMOUNTS[key], " ".join(amount(value))
        elif key in ("sources", "receiving", "following"):
            continue
        else:
            name, text = key, text_of(value)
        yield f"{name:<16} {text}"
    for each in _objects(health.get("receiving")):
        yield f"receiving        version {each.get('version')}: {each.get('have')} of {each.get('of')} shards"
    for source in _objects(health.get("sources")):
        yield f"source           {source.get('url')}: {source.get('state')} {source.get('last_fault')}".rstrip()


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _digest(text: str | None) -> Digest | None:
    try:
        return None if text is None else Digest(text)
    except InvalidManifest as error:
        raise UserError(f"--digest: {error}") from None
