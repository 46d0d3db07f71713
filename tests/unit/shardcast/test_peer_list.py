"""shardcast.peer_list: whom a server may have a client call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardcast.peer_book import Endpoint
from shardcast.peer_list import MAX_PEERS, may_call, parse_peers


def test_an_answer_is_read() -> None:
    found = parse_peers(b'{"peers": [["8.8.8.8", 10], ["::ffff:9.9.9.9", 20]], "again_s": 4.0}', "1.1.1.1")
    assert found.endpoints == (Endpoint("8.8.8.8", 10), Endpoint("9.9.9.9", 20))
    assert found.again_s == 4.0


@pytest.mark.parametrize(
    "fields",
    [
        {"peers": []},
        {"peers": "x", "again_s": 4},
        {"peers": [["8.8.8.8"]], "again_s": 4},
        {"peers": [["8.8.8.8", 0]], "again_s": 4},
        {"peers": [["8.8.8.8", True]], "again_s": 4},
        {"peers": [["host.example", 10]], "again_s": 4},
        {"peers": [[7, 10]], "again_s": 4},
        {"peers": [["8.8.8.8", 10]] * (MAX_PEERS + 1), "again_s": 4},
        {"peers": [], "again_s": 0},
        {"peers": [], "again_s": 1e9},
        {"peers": [], "again_s": "nan"},
        {"peers": [], "again_s": 10**400},
        [],
    ],
)
def test_what_no_honest_server_says_is_refused(fields: Any) -> None:
    with pytest.raises(ValueError):
        parse_peers(json.dumps(fields).encode(), "1.1.1.1")


@pytest.mark.parametrize(
    ("peer", "server", "allowed"),
    [
        ("8.8.8.8", "1.1.1.1", True),
        ("8.8.8.8", "", True),
        ("8.8.8.8", "127.0.0.1", True),
        ("192.168.0.1", "1.1.1.1", False),
        ("192.168.0.1", "", False),
        ("192.168.0.1", "10.0.0.1", True),
        ("fd00::7", "fd00::8", True),
        ("127.0.0.1", "10.0.0.1", False),
        ("127.0.0.1", "1.1.1.1", False),
        ("127.0.0.1", "127.0.0.1", True),
        ("::1", "127.0.0.1", True),
        ("::ffff:127.0.0.1", "1.1.1.1", False),
        ("169.254.169.254", "10.0.0.1", False),
        ("224.0.0.1", "10.0.0.1", False),
        ("224.0.0.1", "", False),
        ("0.0.0.0", "127.0.0.1", False),
        ("2002:c0a8:101::1", "1.1.1.1", False),  # 6to4 of 192.168.1.1
        ("2002:c0a8:101::1", "", False),
        ("2002:808:808::1", "1.1.1.1", True),
        ("64:ff9b::7f00:1", "1.1.1.1", False),  # NAT64 of 127.0.0.1
        ("64:ff9b::7f00:1", "10.0.0.1", False),
        ("64:ff9b::808:808", "1.1.1.1", True),
        ("64:ff9b:1::a00:1", "1.1.1.1", False),
        ("2001:0:c000:200::f5ff:fffe", "1.1.1.1", False),  # Teredo of 10.0.0.1
        ("::192.168.1.1", "1.1.1.1", False),
        ("fec0::1", "1.1.1.1", False),
        ("fec0::1", "", False),
        ("2a00::1", "1.1.1.1", True),
    ],
)
def test_a_server_on_the_internet_sends_nobody_knocking_at_home(peer: str, server: str, allowed: bool) -> None:
    assert may_call(peer, server) is allowed
