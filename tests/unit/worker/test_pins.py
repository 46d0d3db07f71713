from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import UserError
from tests.factories import make_identity, make_terms
from worker.pins import check_pins

URL = "https://run.example"


def test_keys_are_pinned_at_the_first_visit(tmp_path: Path) -> None:
    assert check_pins(tmp_path / "pins", URL, make_terms())
    assert not check_pins(tmp_path / "pins", URL, make_terms())
    assert not check_pins(tmp_path / "pins", URL + "/", make_terms(name="renamed"))


@pytest.mark.parametrize("key", ["coordinator_key", "trainer_key"])
def test_a_changed_key_stops_the_worker(tmp_path: Path, key: str) -> None:
    check_pins(tmp_path, URL, make_terms())
    changed = make_terms(**{key: make_identity(66).key_id})
    for _ in range(2):
        with pytest.raises(UserError, match=f"another {key.replace('_', ' ')} than at the first visit"):
            check_pins(tmp_path, URL, changed)
    assert not check_pins(tmp_path, URL, make_terms())


def test_each_coordinator_has_its_own_pins(tmp_path: Path) -> None:
    check_pins(tmp_path, URL, make_terms())
    assert check_pins(tmp_path, "https://other.example", make_terms(coordinator_key=make_identity(66).key_id))


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "[1]", "{}"])
def test_damaged_pins_are_never_passed_over(tmp_path: Path, content: str) -> None:
    check_pins(tmp_path, URL, make_terms())
    (path,) = tmp_path.iterdir()
    path.write_text(content)
    with pytest.raises(UserError):
        check_pins(tmp_path, URL, make_terms())
