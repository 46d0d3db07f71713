from __future__ import annotations

from pathlib import Path

import pytest

from protocol import keyfile
from protocol.errors import UserError
from tests.factories import make_identity


def test_a_key_is_made_once_and_then_kept(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity.key"
    made, is_new = keyfile.load_or_create(path)
    kept, is_new_again = keyfile.load_or_create(path)
    assert (is_new, is_new_again) == (True, False)
    assert made.key_id == kept.key_id


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity.key"
    keyfile.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    keyfile.load_or_create(path)
    path.chmod(0o640)
    with pytest.raises(UserError, match="chmod 600"):
        keyfile.load(path)


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    keyfile.write(path, make_identity(1))
    with pytest.raises(UserError, match="never overwritten"):
        keyfile.write(path, make_identity(2))
    assert keyfile.load(path).key_id == make_identity(1).key_id


@pytest.mark.parametrize("content", [b"", b"garbage", make_identity(1).to_pem()[:60]])
def test_a_damaged_key_says_what_to_do_and_stays(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(content)
    with pytest.raises(UserError, match="restore it from a backup"):
        keyfile.load_or_create(path)
    assert path.read_bytes() == content


def test_a_folder_in_its_place_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        keyfile.load_or_create(tmp_path)


def test_an_absent_key_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        keyfile.load(tmp_path / "none.key")


def test_a_place_that_cannot_be_written_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        keyfile.write(tmp_path / "file" / "identity.key", make_identity(1))
