"""What a server says about who swaps a version, and whom of those a client may call.

A server can't be believed: one that lists addresses of a client's own machine or network would have the client knock
there. So private addresses are called only if the server itself is at one, and this machine's own only if the server is.
"""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass

from shardcast.peer_book import Endpoint

MAX_PEERS = 200
_MIN_AGAIN_S, _MAX_AGAIN_S = 0.5, 120.0


@dataclass(frozen=True, slots=True)
class Peers:
    """Whom to call, and in how many seconds to ask again."""

    endpoints: tuple[Endpoint, ...]
    again_s: float


def parse_peers(body: bytes, server_address: str) -> Peers:
    """Read an answer of a server at that address. Raises ValueError if it isn't one."""
    try:
        fields = json.loads(body)
        listed, again = fields["peers"], float(fields["again_s"])
        if not isinstance(listed, list) or len(listed) > MAX_PEERS:
            raise ValueError(f"a list of at most {MAX_PEERS} is due")
        endpoints = [_endpoint(address, port) for address, port in listed]
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"lacks {error}") from None
    if not _MIN_AGAIN_S <= again <= _MAX_AGAIN_S:
        raise ValueError("again_s is out of range")
    return Peers(tuple(each for each in endpoints if may_call(each.address, server_address)), again)


def may_call(address: str, server_address: str) -> bool:
    """Whether a peer may be called that a server at `server_address` names.

    >>> may_call("8.8.8.8", "1.1.1.1"), may_call("10.0.0.7", "1.1.1.1"), may_call("10.0.0.7", "192.168.0.2")
    (True, False, True)
    """
    peer = _plain(address)
    try:
        server = _plain(server_address)
    except ValueError:
        return peer.is_global and not peer.is_multicast
    if peer.is_multicast or peer.is_unspecified or peer.is_link_local:
        return False
    if peer.is_loopback:
        return server.is_loopback
    return peer.is_global or not server.is_global


def _endpoint(address: object, port: object) -> Endpoint:
    if not isinstance(address, str) or not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        raise ValueError("a peer is an address and a port")
    return Endpoint(str(_plain(address)), port)


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    found = ipaddress.ip_address(address)
    mapped = getattr(found, "ipv4_mapped", None)
    return mapped or found
