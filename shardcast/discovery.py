"""What a coordinator tells origins and relays: which versions are needed, and who the run's relays are."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from protocol.errors import SourceFault, UserError
from protocol.manifest import MAX_VERSION
from protocol.terms import WELL_KNOWN_PATH, RunTerms, parse_terms
from protocol.trust import Trust, why_unreachable
from shardcast.config import parse_source

_TIMEOUT_S = 10.0
_MAX_BYTES = 2**20
_MAX_REQUIRED = 100_000
_MAX_RELAYS = 64


class Coordinator:
    """The coordinator of one run, over HTTP. Its word decides what is kept and who is asked, never what is right."""

    def __init__(self, url: str) -> None:
        """Raises UserError for a URL that is none. `#sha256=…` pins the coordinator's authority, as for workers."""
        self._trust = Trust(url)
        self.url = parse_source(self._trust.url)

    async def required(self) -> set[int]:
        """The versions that leases, rollouts and batches refer to. Raises SourceFault."""
        try:
            versions = (await self._get_json("/api/v1/versions/required"))["versions"]
            if not isinstance(versions, list) or len(versions) > _MAX_REQUIRED:
                raise ValueError("`versions` is not a list")
            if not all(isinstance(each, int) and 0 <= each <= MAX_VERSION for each in versions):
                raise ValueError("`versions` holds something else than versions")
            return set(versions)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise SourceFault(f"{self.url} doesn't say which versions are required: {error}") from None

    async def terms(self) -> RunTerms:
        """The run's terms. Raises SourceFault."""
        try:
            return parse_terms(await self._get(WELL_KNOWN_PATH), self.url)
        except UserError as error:
            raise SourceFault(str(error)) from None

    async def relays(self) -> list[str]:
        """Base URLs of the run's relays, those that are none left out. Raises SourceFault."""
        found = []
        for url in (await self.terms()).relays[:_MAX_RELAYS]:
            try:
                found.append(parse_source(url))
            except UserError:
                continue
        return list(dict.fromkeys(found))

    async def _get_json(self, path: str) -> Any:
        return json.loads(await self._get(path))

    async def _get(self, path: str) -> bytes:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        try:
            context = await self._trust.context()
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(self.url + path, allow_redirects=False, ssl=context or True) as response,
            ):
                if response.status != 200:
                    raise SourceFault(f"{self.url} answers {response.status} to {path}")
                body = b""
                async for chunk in response.content.iter_chunked(65536):
                    body += chunk
                    if len(body) > _MAX_BYTES:
                        raise SourceFault(f"{self.url} answers {path} with more than {_MAX_BYTES} bytes")
                return body
        except UserError as error:
            raise SourceFault(str(error)) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            mendable = await self._trust.explain(error)
            if mendable is not None:
                raise SourceFault(str(mendable)) from None
            raise SourceFault(f"{self.url} can't be asked: {why_unreachable(error)}") from error
