from __future__ import annotations

import os
from pathlib import Path

import pytest

from protocol.errors import UserError
from protocol.wire import rollout_id
from tests.factories import make_identity, make_rollout, make_tokens, sign_rollout
from worker.outbox import Outbox

ALICE = make_identity(11)


def envelope(length: int = 6):  # type: ignore[no-untyped-def]
    return sign_rollout(make_rollout(tokens=make_tokens(length)), ALICE)


def test_what_is_put_waits_until_it_is_removed(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox")
    assert outbox.waiting() == []
    identifier = outbox.put(envelope())
    assert identifier == rollout_id(envelope().payload)
    assert outbox.waiting() == [identifier]
    assert outbox.get(identifier) == envelope()
    outbox.remove(identifier)
    outbox.remove(identifier)
    assert outbox.waiting() == []


def test_what_is_put_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are synced under the temporary name, then the folder is, which holds the name that stays."""
    synced: list[set[str]] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink() == tmp_path:
            synced.append({path.suffix for path in tmp_path.iterdir()})
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    Outbox(tmp_path).put(envelope())
    assert synced == [{".rollout"}]


def test_it_survives_the_process(tmp_path: Path) -> None:
    identifier = Outbox(tmp_path).put(envelope())
    assert Outbox(tmp_path).get(identifier) == envelope()


def test_the_oldest_goes_first(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    identifiers = [outbox.put(envelope(length)) for length in (9, 5, 7)]
    for age, identifier in enumerate(identifiers):
        os.utime(tmp_path / f"{identifier[7:]}.rollout", ns=(age, age))
    assert outbox.waiting() == identifiers


def test_the_same_rollout_is_kept_once(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    assert outbox.put(envelope()) == outbox.put(envelope())
    assert len(outbox.waiting()) == 1


@pytest.mark.parametrize(
    "damage", [b"", b"\xff\xff\xff", None, "signature"], ids=["empty", "garbage", "changed", "signature"]
)
def test_a_damaged_file_is_set_aside_for_a_person(tmp_path: Path, damage: bytes | str | None) -> None:
    outbox = Outbox(tmp_path)
    identifier = outbox.put(envelope())
    path = tmp_path / f"{identifier[7:]}.rollout"
    content = path.read_bytes().replace(b"g0-0", b"g0-1")
    if damage is not None:
        content = path.read_bytes()[:-1] + b"?" if isinstance(damage, str) else damage
    path.write_bytes(content)
    assert outbox.get(identifier) is None
    assert outbox.waiting() == []
    assert path.with_suffix(".damaged").read_bytes() == content


def test_a_half_written_file_is_no_rollout(tmp_path: Path) -> None:
    (tmp_path / "abc.tmp").write_bytes(b"half")
    assert Outbox(tmp_path).waiting() == []
    assert not (tmp_path / "abc.tmp").exists()


def test_nobody_else_reads_the_folder(tmp_path: Path) -> None:
    Outbox(tmp_path / "outbox")
    assert (tmp_path / "outbox").stat().st_mode & 0o777 == 0o700


def test_a_file_in_its_place_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "outbox").write_text("")
    with pytest.raises(UserError, match="cannot make the outbox"):
        Outbox(tmp_path / "outbox")
