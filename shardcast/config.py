"""Limits of servers and clients, and the reading of URLs and key ids that people type."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from protocol.errors import RollswarmError, UserError
from protocol.manifest import MAX_ENVELOPE_BYTES, MAX_TOTAL_BYTES
from protocol.signing import public_key

MIB = 2**20


@dataclass(frozen=True, slots=True)
class SwarmLimits:
    """What a client that swaps grants. Seconds and counts."""

    per_source: int = 2  # shards taken from one server at a time
    give_up_s: float = 20.0  # without a byte from anybody for so long, the plain way is taken
    stall_s: float = 4.0  # without a piece from the peers for so long, the servers are asked for all that is missing
    patience_s: float = 30.0  # for so long peers are not held against a server's pace, nor servers against one another
    long_s: float = 240.0  # peers that need longer are held against a server whose pace is not known, too


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """What a client grants its sources. Seconds and bytes."""

    parallel: int = 12  # shards in flight
    parallel_per_source: int = 4
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 15.0  # longest silence within an answer
    shard_wait_s: float = 10.0  # how long a relay may hold a request for a shard that it doesn't have yet
    min_bytes_per_s: float = 16_384.0  # an answer slower than this, after the grace, is cut off
    min_rate_grace_s: float = 10.0
    deadline_s: float = 120.0  # without one byte from any source, a fetch gives up
    delta_deadline_s: float = 20.0  # the same for a delta, which the files can stand in for
    ban_s: float = 600.0  # a source that served a bad byte is left out this long, doubling each time
    max_envelope_bytes: int = MAX_ENVELOPE_BYTES
    max_total_bytes: int = MAX_TOTAL_BYTES
    explore: float = 0.1  # share of shards asked from a source at random
    have_wait_s: float = 10.0  # how long a source may hold the question which shards it has
    hint_patience_s: float = 5.0  # without a byte for so long, sources are asked for what they didn't say they have
    sibling_patience_s: float = 10.0  # an idle relay asks its origin for what its siblings wouldn't bring within this
    swarm: SwarmLimits = SwarmLimits()


# A relay's siblings come first: what one has and the other hasn't is what their clients wait for.
RELAY_LIMITS = ClientLimits(parallel=16, parallel_per_source=6)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What an origin or a relay grants its clients. Seconds and counts."""

    max_connections: int = 1024
    max_connections_per_address: int = 256  # behind one proxy all clients share an address
    max_requests_per_address: int = 128  # in flight
    head_wait_s: float = 60.0
    shard_wait_s: float = 25.0
    send_timeout_s: float = 60.0  # a client must take one slice (1 MiB) within this
    keepalive_s: float = 30.0  # also the time to send a whole request's headers
    shutdown_s: float = 5.0


def parse_source(url: str) -> str:
    """A source's base URL without a trailing slash. Raises UserError if it is not plain http(s)."""
    try:
        parts = urlsplit(url.strip())
        port_ok = parts.port is None or parts.port > 0
    except ValueError as error:
        raise UserError(f"{url!r} is not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_ok:
        raise UserError(f"{url!r} is not a source URL; it reads http://host:port or https://host")
    if parts.query or parts.fragment or parts.username or any(char.isspace() for char in url.strip()):
        raise UserError(f"{url!r} holds a query, a fragment, a user name or a space; leave only scheme, host, path")
    return f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")


def parse_sources(urls: Iterable[str]) -> list[str]:
    """Base URLs in order, each once; at least one."""
    sources = list(dict.fromkeys(parse_source(url) for url in urls))
    if not sources:
        raise UserError("no source given: name at least one origin or relay URL")
    return sources


def parse_keys(key_ids: Iterable[str]) -> frozenset[str]:
    """The pinned trainer keys; at least one, each well formed."""
    keys = frozenset(key_id.strip() for key_id in key_ids)
    if not keys:
        raise UserError("no trainer key given: pin at least one, as ed25519:<64 hex digits>")
    for key_id in keys:
        try:
            public_key(key_id)
        except RollswarmError:
            raise UserError(f"{key_id!r} is not a trainer key; a key id reads ed25519:<64 hex digits>") from None
    return keys
