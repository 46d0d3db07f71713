"""shardcast.config: what people type."""

from __future__ import annotations

import pytest

from protocol.errors import UserError
from protocol.signing import Identity
from shardcast.config import parse_keys, parse_source, parse_sources

KEY = Identity.from_seed(b"t" * 32).key_id


@pytest.mark.parametrize(
    ("typed", "base"),
    [
        ("http://host:80", "http://host:80"),
        ("https://relay.example/run/", "https://relay.example/run"),
        (" http://[::1]:9/ ", "http://[::1]:9"),
    ],
)
def test_source_urls(typed: str, base: str) -> None:
    assert parse_source(typed) == base


@pytest.mark.parametrize(
    "typed",
    [
        "",
        "host:80",
        "ftp://host",
        "http://",
        "http://h:99999",
        "http://h:x",
        "http://h?a=1",
        "http://h#f",
        "http://u@h",
        "http://h/a b",
    ],
)
def test_bad_source_urls(typed: str) -> None:
    with pytest.raises(UserError):
        parse_source(typed)


def test_sources_are_kept_in_order_each_once() -> None:
    assert parse_sources(["http://b/", "http://a", "http://b"]) == ["http://b", "http://a"]
    with pytest.raises(UserError, match="at least one"):
        parse_sources([])


@pytest.mark.parametrize("keys", [[], ["ed25519:xyz"], [KEY, "rubbish"], [KEY.upper()]])
def test_bad_keys(keys: list[str]) -> None:
    with pytest.raises(UserError, match="ed25519:"):
        parse_keys(keys)


def test_good_keys() -> None:
    assert parse_keys([KEY, f" {KEY} "]) == {KEY}
