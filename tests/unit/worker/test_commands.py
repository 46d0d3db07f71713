from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from protocol import keyfile
from protocol.errors import UserError
from worker.commands import parse_flags
from worker.main import app


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_flags_are_read_by_the_names_of_the_settings() -> None:
    assert parse_flags(["--max-model-len", "128", "--peers", "--compile", "--name=box"]) == {
        "max_model_len": "128",
        "peers": True,
        "enforce_eager": False,
        "name": "box",
    }
    assert parse_flags(["--enforce-eager"]) == {"enforce_eager": True}
    for wrong in (["--speed", "1"], ["concurrency"], ["--name"], ["--no-name", "x"]):
        with pytest.raises(UserError):
            parse_flags(wrong)


def test_every_setting_is_shown_with_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "worker.toml"
    file.write_text("concurrency = 4\ndrain_s = 5.0\n")
    monkeypatch.setenv("ROLLSWARM_WORKER_CONFIG", str(file))
    monkeypatch.setenv("ROLLSWARM_WORKER_DRAIN_S", "7")
    lines = {line.split()[0]: line for line in run("config", "--name", "box").splitlines() if "  (" in line}
    assert lines["name"].endswith("box  (flag)")
    assert lines["drain_s"].endswith("7.0  (ROLLSWARM_WORKER_DRAIN_S)")
    assert lines["concurrency"].endswith(f"4  ({file})")
    assert lines["max_model_len"].endswith("automatic  (default)")
    assert lines["max_upload_mbit"].endswith("no limit  (default)")
    assert lines["invite"].endswith("none  (default)")


def test_an_identity_is_shown_exported_and_imported(tmp_path: Path) -> None:
    secret = tmp_path / "passphrase"
    secret.write_text("correct horse\n")
    shown = run("identity", "--home", str(tmp_path / "a"))
    key_id = keyfile.load(tmp_path / "a" / "identity.key").key_id
    assert shown.startswith(f"{key_id}\nmade in ")
    assert run("identity", "show", "--home", str(tmp_path / "a")).startswith(f"{key_id}\nkept in ")
    backup = str(tmp_path / "backup")
    run("identity", "export", backup, "--home", str(tmp_path / "a"), "--passphrase-file", str(secret))
    taken = run("identity", "import", backup, "--home", str(tmp_path / "b"), "--passphrase-file", str(secret))
    assert key_id in taken
    assert keyfile.load(tmp_path / "b" / "identity.key").key_id == key_id
