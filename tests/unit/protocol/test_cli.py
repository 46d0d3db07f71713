from __future__ import annotations

import logging

import pytest

from protocol.cli import run_app, set_up_logging
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
