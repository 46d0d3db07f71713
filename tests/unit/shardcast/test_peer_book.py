"""shardcast.peer_book: who announced, bounded in every way."""

from __future__ import annotations

import random

from shardcast.peer_book import EXPIRY_S, MAX_ANSWERED, MAX_PER_ADDRESS, MAX_PER_VERSION, Endpoint, PeerBook


def test_peers_learn_of_one_another_but_not_of_themselves() -> None:
    book, rng = PeerBook(), random.Random(1)
    assert book.announce(1, "a", 10, 0.0, rng) == []
    assert book.announce(1, "b", 20, 0.0, rng) == [Endpoint("a", 10)]
    assert book.announce(1, "a", 10, 1.0, rng) == [Endpoint("b", 20)]
    assert book.announce(2, "c", 30, 1.0, rng) == []


def test_who_accepts_no_connections_is_told_of_others_and_named_to_nobody() -> None:
    book, rng = PeerBook(), random.Random(1)
    book.announce(1, "a", 10, 0.0, rng)
    assert book.announce(1, "b", None, 0.0, rng) == [Endpoint("a", 10)]
    assert book.announce(1, "c", 30, 0.0, rng) == [Endpoint("a", 10)]


def test_who_falls_silent_is_forgotten() -> None:
    book, rng = PeerBook(), random.Random(1)
    book.announce(1, "a", 10, 0.0, rng)
    book.announce(1, "b", 20, EXPIRY_S, rng)
    assert book.announce(1, "c", 30, EXPIRY_S + 0.1, rng) == [Endpoint("b", 20)]
    book.keep({2})
    assert book.versions == [] and book.count(1) == 0


def test_one_address_and_all_together_are_bounded() -> None:
    book, rng = PeerBook(), random.Random(1)
    for port in range(1, 2 * MAX_PER_ADDRESS):
        book.announce(1, "a", port, 0.0, rng)
    assert book.count(1) == MAX_PER_ADDRESS
    for number in range(2 * MAX_PER_VERSION):
        book.announce(1, f"b{number}", 1, 0.0, rng)
    assert book.count(1) == MAX_PER_VERSION
    assert len(book.announce(1, "late", 1, 0.0, rng)) == MAX_ANSWERED
    assert book.announce(1, "a", 1, 50.0, rng) and book.count(1) == MAX_PER_VERSION  # who is in may stay in
