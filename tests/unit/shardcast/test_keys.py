"""shardcast.keys and shardcast.lines: statements outlive the process, and several processes share them."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import BadSignature
from protocol.rotation import sign_rotation
from shardcast.keys import KeyChain
from shardcast.lines import AppendOnlyLines
from tests.factories import RUN_ID, make_identity, make_version

A, B, C = (make_identity(number) for number in (21, 22, 23))
FIRST = sign_rotation(RUN_ID, A, B.key_id, 3)
SECOND = sign_rotation(RUN_ID, B, C.key_id, 5)


def test_statements_are_kept_and_shared(tmp_path: Path) -> None:
    ours, theirs = (KeyChain(tmp_path / "keys", [A.key_id]) for _ in range(2))
    assert ours.extend([FIRST]) == 1
    assert theirs.extend([FIRST, SECOND]) == 1  # it reads what the other wrote before it judges
    ours.refresh()
    for chain in (ours, theirs, KeyChain(tmp_path / "keys", [A.key_id])):
        assert chain.ring.statements == (FIRST, SECOND)
        assert chain.open_manifest(make_version(6, signer=C)).policy_version == 6
        with pytest.raises(BadSignature):
            chain.open_manifest(make_version(6, signer=A))
    assert len((tmp_path / "keys").read_text().split()) == 2


def test_what_is_refused_is_not_written(tmp_path: Path) -> None:
    chain = KeyChain(tmp_path / "keys", [A.key_id])
    assert chain.extend([SECOND]) == 0
    assert not (tmp_path / "keys").exists()


def test_a_file_that_was_tampered_with_gives_no_key(tmp_path: Path) -> None:
    KeyChain(tmp_path / "keys", [B.key_id]).extend([SECOND])
    with (tmp_path / "keys").open("a") as file:
        file.write("rubbish\n")
    assert KeyChain(tmp_path / "keys", [A.key_id]).ring.statements == ()
    assert KeyChain(tmp_path / "keys", [B.key_id]).ring.statements == (SECOND,)


def test_a_torn_line_is_skipped_and_later_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = AppendOnlyLines(path)
    lines.append("one")
    with path.open("a") as file:
        file.write("tor")
    assert lines.read_new() == ["one"]
    lines.append("two")
    assert lines.read_new() == ["tor", "two"]
    assert AppendOnlyLines(tmp_path / "none").read_new() == []
