"""shardcast.have and shardcast.availability: what sources say they have, and what is made of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardcast import bits
from shardcast.availability import CLAIM_S, Availability
from shardcast.have import MAX_ADDED, Have, parse_have

ANSWER: dict[str, Any] = Have("relay", "id", False, "e1", 2, (5, 7), (1,)).to_json()


def test_an_answer_survives_its_way() -> None:
    have = Have("relay", "id", False, "e1", 2, (5, 7), (1,))
    assert parse_have(json.dumps(have.to_json()).encode(), 8) == have
    assert have.next == 4


@pytest.mark.parametrize(
    "change",
    [
        {"added": [8]},
        {"added": [-1]},
        {"added": [True]},
        {"added": "x"},
        {"added": [0] * (MAX_ADDED + 1)},
        {"coming": [8]},
        {"coming": None},
        {"after": -1},
        {"after": 2**60},
        {"epoch": "x" * 65},
        {"epoch": 1},
        {"role": "king"},
        {"id": None},
    ],
)
def test_what_no_honest_server_says_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        parse_have(json.dumps({**ANSWER, **change}).encode(), 8)


@pytest.mark.parametrize("body", [b"", b"[]", b"7", b"{}", b"\xff", b"[" * 100_000])
def test_rubbish_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):
        parse_have(body, 8)


def known(availability: Availability) -> list[int]:
    return list(bits.indexes(availability.of("a").have))


def test_answers_add_up_and_a_new_list_begins_anew() -> None:
    availability = Availability(8)
    availability.update("a", Have("relay", "x", False, "e1", 0, (3, 1)), 0.0)
    availability.update("a", Have("relay", "x", False, "e1", 2, (7,)), 0.0)
    assert known(availability) == [1, 3, 7]
    availability.update("a", Have("relay", "x", False, "e2", 0, (2,)), 0.0)  # it restarted with less
    assert known(availability) == [2]
    availability.update("a", Have("relay", "x", False, "e2", 5, (6,)), 0.0)  # doesn't follow on
    assert known(availability) == [6]
    availability.update("a", Have("relay", "x", True), 0.0)
    assert availability.of("a").have == availability.full == 255


def test_claims_expire_and_a_repeated_claim_is_as_old_as_the_first() -> None:
    availability = Availability(8)
    availability.update("a", Have("relay", "x", False, "e", 0, (), (4, 5)), 0.0)
    availability.update("a", Have("relay", "x", False, "e", 0, (), (5, 6)), 9.0)
    assert list(bits.indexes(availability.of("a").claims(9.5))) == [5, 6]
    assert list(bits.indexes(availability.of("a").claims(CLAIM_S))) == [6]


def test_what_a_source_turns_out_not_to_have_is_left_alone_for_a_while() -> None:
    availability = Availability(3)
    availability.update("a", Have("relay", "x", True), 0.0)
    availability.assume("b")
    for url in ("a", "b"):
        availability.retract(url, 1, 5.0)
        assert [availability.of(url).known(now) for now in (5.0, 6.9, 7.0)] == [0b101, 0b101, 0b111]
    availability.forget("a")
    assert known(availability) == [] and availability.of("a").server_id == "x"
