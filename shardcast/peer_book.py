"""Who swaps a version: the addresses that clients announced. Pure: time and randomness are arguments.

A client can announce only the address that it calls from, so nobody can send others knocking at a third party's door.
What one address can take up is bounded, and so is everything.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

EXPIRY_S = 90.0
MAX_PER_ADDRESS = 32
MAX_PER_VERSION = 2000
MAX_ANSWERED = 50


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a peer accepts connections."""

    address: str
    port: int


class PeerBook:
    """Endpoints by version, each until it was not announced for `EXPIRY_S`."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[Endpoint, float]] = {}

    def announce(self, version: int, address: str, port: int | None, now: float, rng: random.Random) -> list[Endpoint]:
        """Note a peer (without a port it only calls others), and name some of the others, at random."""
        seen = self._seen.setdefault(version, {})
        for endpoint in [each for each, at in seen.items() if now - at > EXPIRY_S]:
            del seen[endpoint]
        own = None if port is None else Endpoint(address, port)
        if own is not None and (own in seen or _has_room(seen, address)):
            seen[own] = now
        others = [each for each in seen if each != own]
        return rng.sample(others, min(len(others), MAX_ANSWERED))

    def count(self, version: int) -> int:
        """How many endpoints are known, some perhaps expired."""
        return len(self._seen.get(version, ()))

    @property
    def versions(self) -> list[int]:
        """The versions that somebody announced."""
        return list(self._seen)

    def keep(self, versions: Collection[int]) -> None:
        """Forget all other versions."""
        self._seen = {version: seen for version, seen in self._seen.items() if version in versions}


def _has_room(seen: dict[Endpoint, float], address: str) -> bool:
    return len(seen) < MAX_PER_VERSION and Counter(each.address for each in seen)[address] < MAX_PER_ADDRESS
