"""Follows the head: downloads each new version while the engine generates, then has it swapped in.

Consumes: SHARDCAST's head (long poll). Produces: verified folders, one swap each. A version that can't be fetched is
retried, and so is a swap that fails, with back-off; generation goes on with the old one as long as the run's staleness allows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from coordinator.client import Backoff
from protocol.errors import SourceFault
from protocol.terms import RunTerms
from shardcast.client import Progress, ShardcastClient
from worker.engine import SwapFailed, Weights
from worker.status import Status

log = logging.getLogger(__name__)

_LONG_POLL_S = 20.0
_RETRY_S = 2.0
_SWAP_RETRY_S = 4.0
_SWAP_RETRY_MAX_S = 120.0


class WeightsFollower:
    """One per worker. `on_new` is awaited with each new version, in order; versions in between are skipped."""

    def __init__(self, client: ShardcastClient, terms: RunTerms, status: Status) -> None:
        self._client = client
        self._terms = terms
        self._status = status

    async def first(self) -> Weights:
        """The newest version there is, waiting for one if none is published."""
        while True:
            weights = await self._next(None)
            if weights is not None:
                return weights
            self._status.waiting_for = "the first policy version"

    async def follow(self, current: Weights, on_new: Callable[[Weights], Awaitable[None]]) -> None:
        """Hand on every newer version until cancelled; again what SwapFailed refuses, as long as nothing newer is there."""
        backoff = Backoff(_SWAP_RETRY_S, _SWAP_RETRY_MAX_S)
        while True:
            weights = await self._next(current.version)
            if weights is None:
                continue
            try:
                await on_new(weights)
            except SwapFailed as error:
                self._status.swap_failure = str(error)
                log.error(
                    "staying with version %d: %s; trying again, with a newer one if there is",
                    *(current.version, error),
                    extra={"action": "swap_failed", "version": weights.version},
                )
                await backoff.pause()
                continue
            backoff.reset()
            self._status.swap_failure = ""
            # The one before stays: the engine goes back to it should it be unable to load another.
            await asyncio.to_thread(self._client.prune, {current.version, weights.version})
            current = weights

    async def _next(self, after: int | None) -> Weights | None:
        try:
            head = await self._client.head(after=after, wait_s=_LONG_POLL_S)
            if head is None:
                return None
            self._status.fetching_version = head.version
            path = await self._client.fetch(head.version, head.manifest_digest, on_progress=self._progress)
            return Weights(head.version, str(head.manifest_digest), path)
        except SourceFault as error:
            log.warning("no weights yet: %s; trying again", error, extra={"action": "fetch_retry"})
            await asyncio.sleep(_RETRY_S)
            return None
        finally:
            self._status.fetching_version = None

    def _progress(self, progress: Progress) -> None:
        self._status.fetch_done, self._status.fetch_total = progress.done, progress.total
