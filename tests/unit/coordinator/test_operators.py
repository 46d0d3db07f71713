from __future__ import annotations

import pytest

from coordinator.operators import (
    SESSION_LIFETIME_S,
    Role,
    check_session,
    csrf_of,
    make_session,
    make_token,
    parse_role,
)
from protocol.errors import UserError
from tests.factories import SECRET

NOW = 1_800_000_000.0
HASH = "ab" * 32


def test_a_session_names_its_token_until_it_is_over() -> None:
    session = make_session(SECRET, HASH, NOW)
    assert check_session(SECRET, session, NOW + SESSION_LIFETIME_S - 1) == HASH
    assert check_session(SECRET, session, NOW + SESSION_LIFETIME_S) is None


@pytest.mark.parametrize("change", [lambda s: s[:-1] + "0", lambda s: "cd" + s[2:], lambda s: s.replace(".", ".9", 1)])
def test_a_session_can_not_be_made_or_changed_by_others(change: object) -> None:
    session = make_session(SECRET, HASH, NOW)
    assert check_session(SECRET, change(session), NOW) in (None, HASH if change(session) == session else None)  # type: ignore[operator]
    assert check_session(b"other" * 7, session, NOW) is None


def test_forms_belong_to_one_session() -> None:
    first, second = make_session(SECRET, HASH, NOW), make_session(SECRET, HASH, NOW + 1)
    assert csrf_of(SECRET, first) != csrf_of(SECRET, second)
    assert csrf_of(SECRET, first) not in first


def test_roles_are_ordered() -> None:
    assert Role.VIEWER < Role.OPERATOR < Role.ADMIN and parse_role("Admin") is Role.ADMIN
    with pytest.raises(UserError, match="viewer, operator or admin"):
        parse_role("root")


def test_tokens_differ() -> None:
    assert len({make_token() for _ in range(50)}) == 50
