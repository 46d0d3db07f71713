"""How much one key, one address and all together may ask for. Decisions are pure; `Door` keeps the state of one process.

Every replica counts for itself: the limits keep a process alive, they are no quota. Nothing here waits; who asks too much is
told when to come back. Addresses of loopback are not limited: what comes from there is this machine's, or a proxy's that
limits for us.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from protocol.errors import Busy
from protocol.trust import is_loopback

_REMEMBERED = 65_536  # buckets; who is forgotten begins with a full one, which costs us one burst
_STREAM_AGAIN_S = 30.0  # streams last
_IPV6_PREFIX = 64  # one household or host has all of these
_is_ours = lru_cache(maxsize=4096)(is_loopback)  # asked of every call


@dataclass(frozen=True, slots=True)
class Rate:
    """Calls per second in the long run, and at once."""

    per_s: float
    burst: float


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tokens left at a time."""

    level: float
    at: float


def take(bucket: Bucket | None, rate: Rate, now: float, cost: float = 1.0) -> tuple[Bucket, float]:
    """Take `cost` tokens. Returns the bucket afterwards and 0, or the bucket as it is and the seconds until there are enough.

    A clock that runs backwards refills nothing.
    """
    level = rate.burst if bucket is None else min(rate.burst, bucket.level + max(0.0, now - bucket.at) * rate.per_s)
    at = now if bucket is None else max(now, bucket.at)
    if level >= cost:
        return Bucket(level - cost, at), 0.0
    return Bucket(level, at), (cost - level) / rate.per_s


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """Rates in calls per second, the others in calls under way at once (a long poll counts while it waits), or in streams.

    Streams are no calls: those who only look on can't take the room of those who work.
    """

    key: Rate = Rate(100.0, 400.0)  # who answers shortly at hundreds at once hands in dozens a second
    key_calls: int = 64
    address: Rate = Rate(400.0, 2000.0)
    address_calls: int = 2048
    registrations: Rate = Rate(0.5, 60.0)  # per address: each writes a row
    calls: int = 8192
    address_streams: int = 8
    streams: int = 256


class Buckets:
    """Buckets by name, the least recently used forgotten first."""

    def __init__(self, rate: Rate, remembered: int = _REMEMBERED) -> None:
        self._rate = rate
        self._remembered = remembered
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def take(self, name: str, now: float) -> float:
        """0, or seconds until `name` may come again."""
        self._buckets[name], wait = take(self._buckets.get(name), self._rate, now)
        self._buckets.move_to_end(name)
        if len(self._buckets) > self._remembered:
            self._buckets.popitem(last=False)
        return wait

    def __len__(self) -> int:
        return len(self._buckets)


class Door:
    """The limits of one process. `clock`: monotonic seconds; `on_busy(limit)`: counts whom it turned away."""

    def __init__(
        self, limits: DoorLimits, clock: Callable[[], float], on_busy: Callable[[str], None] = lambda limit: None
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._on_busy = on_busy
        self._keys = Buckets(limits.key)
        self._addresses = Buckets(limits.address)
        self._registrations = Buckets(limits.registrations)
        self._under_way: Counter[str] = Counter()
        self._total = 0

    @contextlib.contextmanager
    def address(self, address: str, *, registers: bool) -> Iterator[None]:
        """One call from this address. Raises Busy."""
        if self._total >= self._limits.calls:
            raise self._busy("calls", "the coordinator has as much to do as it can take", 1.0)
        self._total += 1
        try:
            if _is_ours(address):
                yield
                return
            self._pass(self._addresses, address, "address")
            if registers:
                self._pass(self._registrations, address, "registrations")
            with self._count(f"address {address}", self._limits.address_calls, "address_calls"):
                yield
        finally:
            self._total -= 1

    @contextlib.contextmanager
    def stream(self, address: str) -> Iterator[None]:
        """One stream to this address, as long as it is open. Raises Busy."""
        with contextlib.ExitStack() as counted:
            if not _is_ours(address):
                self._pass(self._addresses, address, "address")
                most = self._limits.address_streams
                counted.enter_context(self._count(f"streams {address}", most, "address_streams", _STREAM_AGAIN_S))
            counted.enter_context(self._count("streams", self._limits.streams, "streams", _STREAM_AGAIN_S))
            yield

    @contextlib.contextmanager
    def key(self, key_id: str) -> Iterator[None]:
        """One call by this key, whose token was checked. Raises Busy."""
        self._pass(self._keys, key_id, "key")
        with self._count(key_id, self._limits.key_calls, "key_calls"):
            yield

    def _pass(self, buckets: Buckets, name: str, limit: str) -> None:
        wait = buckets.take(name, self._clock())
        if wait > 0:
            raise self._busy(limit, f"too many calls (limits.{limit})", wait)

    @contextlib.contextmanager
    def _count(self, name: str, most: int, limit: str, again_s: float = 1.0) -> Iterator[None]:
        if self._under_way[name] >= most:
            raise self._busy(limit, f"{most} are under way already (limits.{limit})", again_s)
        self._under_way[name] += 1
        try:
            yield
        finally:
            self._under_way[name] -= 1
            if not self._under_way[name]:
                del self._under_way[name]

    def _busy(self, limit: str, detail: str, wait: float) -> Busy:
        self._on_busy(limit)
        return Busy(detail, wait)


@lru_cache(maxsize=4096)
def address_group(address: str) -> str:
    """Whom limits take for one: an IPv4 address, or the /64 that an IPv6 address is in."""
    # gRPC writes "%5B::1%5D"; what follows another "%" is the name of an interface.
    bare = address.replace("%5B", "").replace("%5D", "").strip("[]").partition("%")[0]
    try:
        parsed = ipaddress.ip_address(bare)
    except ValueError:
        return address[:64]
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        if not parsed.is_loopback:
            return str(ipaddress.ip_network((parsed, _IPV6_PREFIX), strict=False))
    return str(parsed)
