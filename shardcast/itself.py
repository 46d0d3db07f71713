"""Whether what a relay fills from is that relay, under another name: then it answers with the relay's own id."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable

import aiohttp

from protocol.errors import UserError

_TIMEOUT_S = 10.0
_AGAIN_S = 5.0
_MAX_BYTES = 2**20


async def refuse_itself(urls: Iterable[str], own_id: str) -> None:
    """Return once each source has answered `/healthz`, however long that takes. Raises UserError if one is `own_id`."""
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        waiting = list(urls)
        while waiting:
            ids = await asyncio.gather(*(_id_of(session, url) for url in waiting))
            for url, found in zip(waiting, ids, strict=True):
                if found == own_id:
                    raise UserError(f"{url} is this relay itself: name an origin or another relay")
            waiting = [url for url, found in zip(waiting, ids, strict=True) if found is None]
            if waiting:
                await asyncio.sleep(_AGAIN_S)


async def _id_of(session: aiohttp.ClientSession, url: str) -> str | None:
    """What a server calls itself, empty if it doesn't say; None if it can't be asked."""
    try:
        async with session.get(f"{url}/healthz", allow_redirects=False) as response:
            if response.status != 200:
                return None
            try:
                body = await response.content.readexactly(_MAX_BYTES)
            except asyncio.IncompleteReadError as whole:
                body = whole.partial
            health = json.loads(body)
            return str(health.get("id", "")) if isinstance(health, dict) else ""
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None
    except (ValueError, RecursionError):
        return ""
