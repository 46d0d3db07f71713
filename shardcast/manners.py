"""How a relay shares its uplink: clients first, while both this relay and the sibling that asks are busy with theirs.

What siblings give each other serves later clients; what clients get, they wait for. As long as every relay has clients
to serve, these can take from each relay what that relay has, so the exchange only delays them, and gets `SHARE` of
what clients get. A sibling that says it is idle (its clients wait for what it lacks) is served like a client.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator

from shardcast.pulse import Pulse

SHARE = 1 / 32
_BURST_BYTES = 2**20
_PATIENCE_S = 4.0  # a slice for a sibling waits no longer: slow clients must not starve it
_WINDOW_S = 2.0
_BUSY = 0.5


class Manners:
    """Used from one event loop, by the server that sends and by the client that asks siblings."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._clients = 0
        self._credit = 0.0
        self._share_busy = 0.0
        self._at = clock()
        self._pulse = Pulse()

    @property
    def busy(self) -> bool:
        """Whether clients were being sent to most of the last seconds."""
        self._look()
        return self._share_busy > _BUSY

    def expect_clients(self) -> None:
        """A version begins: whoever waited for it is about to ask."""
        self._look()
        self._share_busy = 1.0

    @contextlib.contextmanager
    def serving_client(self) -> Iterator[None]:
        """While a shard goes to a client."""
        self._look()
        self._clients += 1
        try:
            yield
        finally:
            self._look()
            self._clients -= 1
            self._pulse.beat()

    def sent(self, count: int) -> None:
        """Bytes went to a client: siblings may have their share."""
        self._credit = min(_BURST_BYTES, self._credit + count * SHARE)
        self._pulse.beat()

    async def let_clients_pass(self, count: int) -> None:
        """Return when a sibling may have `count` bytes."""
        await self._pulse.wait_until(lambda: not self._clients or self._credit >= count, _PATIENCE_S)
        self._credit = max(0.0, self._credit - count)

    def _look(self) -> None:
        now = self._clock()
        kept = math.exp(-(now - self._at) / _WINDOW_S)
        self._share_busy = self._share_busy * kept + (1 - kept if self._clients else 0.0)
        self._at = now
