"""shardcast.listen: who is one too many."""

from __future__ import annotations

import pytest

from shardcast.config import ServerLimits
from shardcast.listen import party, refusal

LIMITS = ServerLimits(max_connections=4, max_connections_per_address=2)


@pytest.mark.parametrize(
    ("address", "others", "reason"),
    [
        ("10.0.0.1", [], None),
        ("10.0.0.1", ["10.0.0.1"], None),
        ("10.0.0.1", ["10.0.0.1", "10.0.0.1"], "address"),
        ("10.0.0.2", ["10.0.0.1", "10.0.0.1", "?"], None),
        ("10.0.0.2", ["10.0.0.1", "10.0.0.3", "10.0.0.4", "10.0.0.5"], "total"),
        ("2001:db8::1", ["2001:db8::2", "2001:db8::3"], "address"),
        ("2001:db8:0:1::1", ["2001:db8::2", "2001:db8::3"], None),
        ("::ffff:10.0.0.1", ["10.0.0.1", "10.0.0.1"], "address"),
    ],
)
def test_a_connection_too_many_is_refused(address: str, others: list[str], reason: str | None) -> None:
    assert refusal(address, others, LIMITS) == reason


def test_an_address_is_one_party() -> None:
    assert party("fe80::1%eth0") == party("fe80::2") == "fe80::/64"
    assert party("no address") == "no address"
