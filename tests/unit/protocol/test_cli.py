from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
from aiohttp.http_exceptions import BadHttpMessage
from aiohttp.web import RequestPayloadError

from protocol.cli import _is_news, build_of, run_app, set_up_logging
from protocol.errors import OurFault, UserError


@pytest.fixture
def _restored_logging() -> object:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("no such file: run.toml"), 2, "worker: no such file: run.toml\n"),
        (OurFault("the engine died"), 1, "worker: the engine died\n"),
        (KeyboardInterrupt(), 130, "worker: interrupted\n"),
    ],
)
def test_an_error_is_one_line_and_an_exit_status(
    error: BaseException, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def app() -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        run_app("worker", app)
    assert caught.value.code == status
    assert capsys.readouterr().err == line


def test_an_app_that_ends_well_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    run_app("worker", lambda: print("done"))
    assert capsys.readouterr().out == "done\n"


def test_our_own_bugs_are_not_hidden() -> None:
    def app() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_app("worker", app)


@pytest.mark.usefixtures("_restored_logging")
def test_a_log_line_carries_its_action_and_ids(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging()
    logging.getLogger("worker.loop").info("stopped", extra={"action": "abort", "lease_id": "abc"})
    logging.getLogger("aiosqlite").info("chatter")
    err = capsys.readouterr().err
    assert err.endswith("INFO worker.loop: stopped action=abort lease_id=abc\n")
    assert "chatter" not in err


def test_the_version_tells_protocol_and_build(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["relay", "--version"])
    run_app("relay", lambda: print("not asked"))
    assert ", protocol 1 to 2, build " in capsys.readouterr().out


def test_the_build_is_what_the_image_says_or_the_checkouts_commit(tmp_path: Path) -> None:
    package = tmp_path / "protocol"
    package.mkdir()
    assert build_of(package) == "unknown"
    (tmp_path / ".git" / "refs").mkdir(parents=True)
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/main\n")
    (tmp_path / ".git" / "refs" / "main").write_text("0123456789abcdef\n")
    assert build_of(package) == "0123456789ab"
    (package / "BUILD").write_text("image-7\n")
    assert build_of(package) == "image-7"


def test_what_strangers_send_leaves_no_traceback_and_our_own_faults_do() -> None:
    record = logging.LogRecord("aiohttp.server", logging.ERROR, "", 0, "Unhandled", None, None)
    assert _is_news(record)
    for error, news in ((BadHttpMessage("x"), False), (RequestPayloadError("x"), False), (RuntimeError("ours"), True)):
        record.exc_info = (type(error), error, None)
        assert _is_news(record) is news
