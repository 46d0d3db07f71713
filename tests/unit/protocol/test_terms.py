from __future__ import annotations

import json
from typing import Any

import pytest

from protocol.errors import UserError
from protocol.terms import parse_terms
from tests.factories import make_terms
from tests.turns import make_sums

SOURCE = "https://run.example"


def served(**changes: Any) -> bytes:
    return json.dumps({**json.loads(make_terms().to_json()), **changes}).encode()


def test_terms_survive_their_json() -> None:
    terms = make_terms(model_digest="sha256:" + "0" * 64)
    assert parse_terms(terms.to_json().encode(), SOURCE) == terms


def test_fields_of_a_later_protocol_are_passed_over() -> None:
    assert parse_terms(served(color="blue"), SOURCE) == make_terms()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"null",
        b"{}",
        b"\xff\xfe",
        served(relays=5),
        served(relays="http://relay"),
        served(grpc_endpoints=[1]),
        served(protocol_min="1"),
        served(max_tokens="many"),
        served(lease_term_s=None),
        served(eos_token_ids=["a"]),
        served(coordinator_key="ed25519:nope"),
        served(trainer_key=None),
        served(run_id=["x"]),
    ],
)
def test_what_is_no_terms_is_the_users_mistake_and_names_the_source(body: bytes) -> None:
    with pytest.raises(UserError, match=r"https://run\.example"):
        parse_terms(body, SOURCE)


def test_an_endless_answer_is_no_coordinator() -> None:
    with pytest.raises(UserError, match="no coordinator"):
        parse_terms(b" " * ((1 << 20) + 1), SOURCE)


@pytest.mark.parametrize(("low", "high"), [(3, 4), (0, 0)])
def test_another_protocol_says_what_to_update(low: int, high: int) -> None:
    with pytest.raises(UserError, match="update rollswarm on the older side"):
        parse_terms(served(protocol_min=low, protocol_max=high), SOURCE)


def test_a_run_id_cannot_leave_the_workers_folder() -> None:
    for run_id in ("../../etc", "a/b", "", "..", "x" * 200):
        with pytest.raises(UserError, match="run_id"):
            parse_terms(served(run_id=run_id), SOURCE)


@pytest.mark.parametrize(
    "changes",
    [
        {"lease_term_s": 0},
        {"lease_term_s": -1.0},
        {"lease_term_s": float("nan")},
        {"lease_term_s": float("inf")},
        {"temperature": 0.0},
        {"temperature": float("nan")},
        {"max_tokens": 0},
        {"max_staleness": -1},
    ],
)
def test_terms_that_nobody_can_keep_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="nobody can keep"):
        parse_terms(served(**changes), SOURCE)


def test_a_run_of_single_turns_is_served_as_before() -> None:
    assert "turns" not in json.loads(make_terms().to_json())


def test_rules_of_turns_survive_their_json_with_their_name() -> None:
    terms = make_terms(turns=(make_sums().rules, make_sums(max_calls=3).rules))
    parsed = parse_terms(terms.to_json().encode(), SOURCE)
    assert parsed == terms
    assert [rules.digest for rules in parsed.turns] == [rules.digest for rules in terms.turns]


@pytest.mark.parametrize(
    "changes",
    [
        {"tool": 5},
        {"stop_token_ids": []},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": ["a"]},
        {"stop_token_ids": list(range(257))},
        {"max_calls": 0},
        {"max_calls": 257},
        {"max_calls": True},
        {"max_answer_tokens": 0},
        {"max_answer_tokens": 1 << 20},
    ],
)
def test_rules_that_are_none_are_refused(changes: dict[str, Any]) -> None:
    rules = json.loads(make_terms(turns=(make_sums().rules,)).to_json())["turns"][0]
    for value in ([rules | changes], [{}], [5], rules):
        with pytest.raises(UserError, match=r"https://run\.example"):
            parse_terms(served(turns=value), SOURCE)
