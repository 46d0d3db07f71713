"""What the coordinator thinks of us: numbers for the console, rejections for the log, and the end if the key is banned."""

from __future__ import annotations

import asyncio
import logging

from coordinator.client import WorkerClient
from protocol.errors import UserError
from worker.outbox import Outbox
from worker.status import Status
from worker.twin import MESSAGE, Twin
from worker.verdict import verdict_line

log = logging.getLogger(__name__)

_EVERY_S = 5.0


class Standing:
    """One per worker. The outbox tells which of the coordinator's rollouts may be ours."""

    def __init__(self, client: WorkerClient, outbox: Outbox, status: Status) -> None:
        self._client = client
        self._outbox = outbox
        self._status = status
        self._told: set[str] = set()  # rejections that the log has
        self._twin = Twin()

    async def follow(self) -> None:
        """Ask again and again, until cancelled or banned."""
        while True:
            await self.ask()
            await asyncio.sleep(_EVERY_S)

    async def ask(self) -> None:
        """The coordinator's view of us. Raises UserError with the reason if we are banned."""
        standing = await self._client.standing()
        self._status.credits, self._status.strikes = standing.credits, standing.strikes
        self._status.accepted, self._status.rejected = standing.accepted, standing.rejected
        self._status.pending = standing.pending
        self._look_for_a_twin(standing.accepted + standing.rejected + standing.pending)
        rejected = [verdict for verdict in standing.verdicts if verdict.outcome == "rejected"]
        if rejected:
            self._status.last_reason = f"{rejected[0].reason}: {rejected[0].detail}"
        for verdict in reversed(rejected):
            if verdict.rollout_id not in self._told:
                log.warning("%s", verdict_line(verdict), extra={"action": "rejected", "rollout_id": verdict.rollout_id})
        self._told = {verdict.rollout_id for verdict in rejected}
        if standing.banned:
            self._status.banned = standing.ban_reason
            raise UserError(
                f"this key is banned from the run: {standing.ban_reason}; `worker status` shows the evidence, and only the "
                "run's operator can lift a ban"
            )

    def _look_for_a_twin(self, known: int) -> None:
        """Say once that another worker uses our key. `known`: its rollouts at the coordinator."""
        status = self._status
        handed_in = status.receipts + status.refused
        unanswered = max(status.outbox, len(self._outbox.waiting()))
        count = self._twin.elsewhere(known=known, handed_in=handed_in, unanswered=unanswered)
        if count and not status.twin:
            log.warning("%s", MESSAGE.format(count=count), extra={"action": "twin"})
        status.twin = max(status.twin, count)
