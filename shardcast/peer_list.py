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
# The last 32 bits are an IPv4 address: NAT64 (RFC 6052, RFC 8215), and the old form ::a.b.c.d (RFC 4291).
_EMBEDDING = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "::/96")))
_MIN_AGAIN_S, _MAX_AGAIN_S = 0.5, 120.0

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


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
    except OverflowError:  # a whole number of hundreds of digits
        raise ValueError("again_s is out of range") from None
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
        return _is_global(peer)
    if peer.is_multicast or peer.is_unspecified or peer.is_link_local:
        return False
    if peer.is_loopback:
        return server.is_loopback
    return _is_global(peer) or not _is_global(server)


def _endpoint(address: object, port: object) -> Endpoint:
    if not isinstance(address, str) or not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        raise ValueError("a peer is an address and a port")
    return Endpoint(str(_mapped(address)), port)


def _is_global(address: Address) -> bool:
    return address.is_global and not address.is_multicast and not getattr(address, "is_site_local", False)


def _mapped(address: str) -> Address:
    """An address as it is called: of IPv4 if it is one written as IPv6. Raises ValueError."""
    found = ipaddress.ip_address(address)
    return getattr(found, "ipv4_mapped", None) or found


def _plain(address: str) -> Address:
    """Where packets to an address end up: what a translator or a tunnel unpacks of it counts. Raises ValueError."""
    found = _mapped(address)
    if isinstance(found, ipaddress.IPv4Address):
        return found
    if found.sixtofour is not None:
        return found.sixtofour
    if found.teredo is not None:
        return found.teredo[1]
    if int(found) > 1 and any(found in network for network in _EMBEDDING):  # :: and ::1 are themselves
        return ipaddress.IPv4Address(int(found) & 0xFFFF_FFFF)
    return found
