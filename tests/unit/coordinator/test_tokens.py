from __future__ import annotations

import base64

import pytest

from coordinator.tokens import (
    CHALLENGE_LIFETIME_S,
    TOKEN_LIFETIME_S,
    check_challenge,
    check_token,
    make_challenge,
    make_token,
)
from protocol.errors import BadSignature
from tests.factories import SECRET, make_identity

ALICE, BOB = make_identity(11).key_id, make_identity(12).key_id
NOW = 1_800_000_000.0


def test_a_token_names_its_worker() -> None:
    assert check_token(SECRET, make_token(SECRET, ALICE, NOW), NOW + TOKEN_LIFETIME_S - 1) == ALICE


def test_a_token_ends() -> None:
    with pytest.raises(BadSignature, match="expired"):
        check_token(SECRET, make_token(SECRET, ALICE, NOW), NOW + TOKEN_LIFETIME_S)


def test_another_runs_token_is_refused() -> None:
    with pytest.raises(BadSignature, match="not given out by this run"):
        check_token(SECRET, make_token(bytes(32), ALICE, NOW), NOW)


@pytest.mark.parametrize("token", ["", "x", "ÄÖ", "a" * 7, "!!!!", base64.urlsafe_b64encode(bytes(200)).decode()])
def test_what_is_no_token_is_refused(token: str) -> None:
    with pytest.raises(BadSignature, match="register again"):
        check_token(SECRET, token, NOW)


def test_no_byte_of_a_token_can_change() -> None:
    raw = base64.urlsafe_b64decode(make_token(SECRET, ALICE, NOW))
    for position in range(len(raw)):
        forged = raw[:position] + bytes([raw[position] ^ 1]) + raw[position + 1 :]
        with pytest.raises(BadSignature):
            check_token(SECRET, base64.urlsafe_b64encode(forged).decode(), NOW)


def test_a_challenge_is_for_one_key_and_a_minute() -> None:
    challenge = make_challenge(SECRET, ALICE, NOW)
    assert len(challenge) <= 256
    check_challenge(SECRET, challenge, ALICE, NOW + CHALLENGE_LIFETIME_S - 1)
    with pytest.raises(BadSignature, match="another key"):
        check_challenge(SECRET, challenge, BOB, NOW)
    with pytest.raises(BadSignature, match="expired"):
        check_challenge(SECRET, challenge, ALICE, NOW + CHALLENGE_LIFETIME_S)


def test_a_challenge_is_no_token() -> None:
    challenge = make_challenge(SECRET, ALICE, NOW)
    with pytest.raises(BadSignature):
        check_token(SECRET, base64.urlsafe_b64encode(challenge).decode(), NOW)
