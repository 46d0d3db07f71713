from __future__ import annotations

import stat
from pathlib import Path

import pytest

from protocol import keyfile
from protocol.errors import UserError
from worker.identity_file import export_identity, import_identity


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    keyfile.load_or_create(tmp_path / "a" / "identity.key")
    export_identity(tmp_path / "a" / "identity.key", tmp_path / "backup", "correct horse")
    return tmp_path / "backup"


def test_an_identity_travels_under_its_passphrase(tmp_path: Path, exported: Path) -> None:
    assert stat.S_IMODE(exported.stat().st_mode) == 0o600
    assert b"ENCRYPTED" in exported.read_bytes()
    key_id = import_identity(exported, tmp_path / "b" / "identity.key", "correct horse")
    assert key_id == keyfile.load(tmp_path / "a" / "identity.key").key_id
    assert keyfile.load(tmp_path / "b" / "identity.key").key_id == key_id


def test_a_wrong_passphrase_or_a_damaged_file_changes_nothing(tmp_path: Path, exported: Path) -> None:
    target = tmp_path / "b" / "identity.key"
    with pytest.raises(UserError, match="passphrase is wrong"):
        import_identity(exported, target, "wrong horse!")
    exported.write_bytes(exported.read_bytes()[:-80])
    with pytest.raises(UserError, match="can't be opened"):
        import_identity(exported, target, "correct horse")
    assert not target.exists()


def test_nothing_is_overwritten(tmp_path: Path, exported: Path) -> None:
    with pytest.raises(UserError, match="exists"):
        export_identity(tmp_path / "a" / "identity.key", exported, "correct horse")
    with pytest.raises(UserError, match="never overwritten"):
        import_identity(exported, tmp_path / "a" / "identity.key", "correct horse")


def test_what_is_no_exported_identity_is_named(tmp_path: Path) -> None:
    keyfile.load_or_create(tmp_path / "identity.key")
    with pytest.raises(UserError, match="at least 8"):
        export_identity(tmp_path / "identity.key", tmp_path / "backup", "short")
    with pytest.raises(UserError, match="no identity in"):
        export_identity(tmp_path / "none.key", tmp_path / "backup", "long enough")
    with pytest.raises(UserError, match="bare key file"):
        import_identity(tmp_path / "identity.key", tmp_path / "b.key", "long enough")
    with pytest.raises(UserError, match="cannot read"):
        import_identity(tmp_path / "none", tmp_path / "b.key", "long enough")
