"""Clients tell the server that they fetched from when a delta was of no use to them, so that its operator sees it.

POST /v1/reports {"version": V, "reason": "blob_absent"}    204 counted; 429 enough for now

Anyone may say anything, so it counts for nothing but a number on the page: a few reasons, a small body, at most
`PER_MINUTE` a minute, and only about versions that exist.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from shardcast.bandwidth import TokenBucket
from shardcast.delta.errors import FallbackReason
from shardcast.metrics import ShardcastMetrics

log = logging.getLogger("shardcast")

PER_MINUTE = 60
_BURST = 20
_MAX_BYTES = 256
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Report:
    """One client's word that the delta of a version failed it."""

    version: int
    reason: FallbackReason

    def to_json(self) -> dict[str, object]:
        """As HTTP carries it."""
        return {"version": self.version, "reason": self.reason.value}


def parse_report(body: bytes) -> Report:
    """Read what anyone may send. Raises ValueError."""
    if len(body) > _MAX_BYTES:
        raise ValueError("a report is small")
    try:
        fields = json.loads(body)
        version, reason = fields["version"], FallbackReason(fields["reason"])
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"a report has a version and a reason: {error}") from None
    if not isinstance(version, int) or isinstance(version, bool) or version < 0 or len(fields) != 2:
        raise ValueError("a report has a version and a reason")
    return Report(version, reason)


class Reports:
    """Counts reports about versions up to the `newest`, and hands each to `on_report` (a relay tells its own source)."""

    def __init__(
        self,
        metrics: ShardcastMetrics,
        newest: Callable[[], int | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.on_report: Callable[[Report], None] = lambda report: None
        self._metrics = metrics
        self._newest = newest
        self._clock = clock
        self._bucket = TokenBucket(PER_MINUTE / 60, _BURST, clock())

    def add(self, report: Report) -> bool:
        """Count a report; says whether it was counted. Raises ValueError for a version that doesn't exist."""
        newest = self._newest()
        if newest is None or report.version > newest:
            raise ValueError(f"there is no version {report.version}")
        if self._bucket.take(1, self._clock()) > 0:
            self._bucket.take(-1, self._clock())  # who is refused adds no debt
            return False
        self.counts[report.reason.value] += 1
        self._metrics.reported_fallbacks.labels(report.reason.value).inc()
        self.on_report(report)
        return True

    async def handle(self, request: web.Request) -> web.Response:
        """The route."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                body = b""
                while len(body) <= _MAX_BYTES and (chunk := await request.content.readany()):
                    body += chunk
            counted = self.add(parse_report(body))
        except TimeoutError:
            return web.json_response({"error": "the report didn't come in time"}, status=408)
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=400)
        if not counted:
            return web.json_response({"error": "enough reports for now"}, status=429)
        return web.Response(status=204)


async def send_report(session: aiohttp.ClientSession, url: str, version: int, reason: FallbackReason) -> None:
    """Tell a source. It may not know the route, or be away: that is logged and no more."""
    try:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        body = Report(version, reason).to_json()
        async with session.post(f"{url}/v1/reports", json=body, timeout=timeout, allow_redirects=False) as response:
            log.info("told %s of a delta's failure: %d", url, response.status, extra={"action": "report"})
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        log.info("can't tell %s of a delta's failure: %s", url, error, extra={"action": "report"})
