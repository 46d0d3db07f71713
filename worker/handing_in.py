"""Hands in what is finished: rollouts wait in the outbox, on disk, until each has its receipt or is refused for good."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from coordinator.client import Backoff, WorkerClient
from protocol.errors import BadSignature, OurFault, WorkerFault
from protocol.signing import SignedEnvelope
from worker.outbox import Outbox
from worker.status import Status

log = logging.getLogger(__name__)

_SUBMISSIONS_AT_ONCE = 8
_RESUBMIT_S = 5.0
_DRAIN_PATIENCE_S = 10.0


class HandingIn:
    """One per worker; `key_id`: of the worker's own identity. `on_round` is awaited when the outbox has got shorter."""

    def __init__(
        self,
        client: WorkerClient,
        outbox: Outbox,
        status: Status,
        *,
        key_id: str,
        on_round: Callable[[], Awaitable[None]],
    ) -> None:
        self._client = client
        self._outbox = outbox
        self._status = status
        self._key_id = key_id
        self._on_round = on_round
        self._posted = asyncio.Event()  # something new is in the outbox
        self._posted.set()  # what an earlier process left
        status.outbox = len(outbox.waiting())

    async def post(self, envelope: SignedEnvelope) -> None:
        """Into the outbox; a full disk is said and waited out rather than losing the rollout."""
        backoff = Backoff(1.0, 30.0)
        while True:
            try:
                await asyncio.to_thread(self._outbox.put, envelope)
                break
            except OSError as error:
                log.error(
                    "cannot write the outbox (%s): free some space; trying again", error, extra={"action": "outbox"}
                )
                await backoff.pause()
        self._status.outbox += 1
        self._posted.set()

    async def follow(self) -> None:
        """Submit whatever waits, until cancelled."""
        while True:
            await self._posted.wait()
            self._posted.clear()
            waiting = await asyncio.to_thread(self._outbox.waiting)
            done: list[bool] = []
            for start in range(0, len(waiting), _SUBMISSIONS_AT_ONCE):
                some = waiting[start : start + _SUBMISSIONS_AT_ONCE]
                done += await asyncio.gather(*(self._submit(identifier) for identifier in some))
                self._status.outbox = len(self._outbox.waiting())
                await self._on_round()
            if not all(done):
                await asyncio.sleep(_RESUBMIT_S)
                self._posted.set()

    async def empty(self) -> None:
        """Wait, not for long, until `follow` has handed in everything."""
        deadline = time.monotonic() + _DRAIN_PATIENCE_S
        while self._outbox.waiting() and time.monotonic() < deadline:
            self._posted.set()
            await asyncio.sleep(0.1)

    async def _submit(self, identifier: str) -> bool:
        """Hand one in. False if it stays: what is neither receipted nor refused for good is never forgotten."""
        envelope = self._outbox.get(identifier)
        if envelope is None:
            log.error(
                "a damaged file in the outbox was set aside", extra={"action": "outbox", "rollout_id": identifier}
            )
            return True
        try:
            await self._client.submit(envelope)
            self._status.receipts += 1
        except OurFault as error:
            log.error("no receipt: %s; trying again", error, extra={"action": "receipt", "rollout_id": identifier})
            return False
        except WorkerFault as fault:
            if isinstance(fault, BadSignature) and envelope.key_id == self._key_id:
                # The signature holds (the outbox looked): it is our token that is not taken.
                log.error("not let in: %s; trying again", fault, extra={"action": "token", "rollout_id": identifier})
                return False
            self._status.refused += 1
            self._status.last_reason = f"{fault.reason}: {fault.detail}"
            log.warning("refused, %s", fault, extra={"action": "refused", "rollout_id": identifier})
        self._outbox.remove(identifier)
        return True
