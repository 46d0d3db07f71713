from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.errors import OurFault, UserError
from worker.home import held, holder, leave

_HOLD = """
import signal, sys, pathlib
from worker.home import held
with held(pathlib.Path(sys.argv[1])):
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1) if len(sys.argv) < 3 else None)
    print("held", flush=True)
    while not stop:
        signal.pause()
"""


def hold(home: Path, *extra: str) -> subprocess.Popen[str]:
    """Another process that holds the home until SIGTERM; with `extra`, longer."""
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(home), *extra], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_home_is_held_by_one_process_and_free_afterwards(tmp_path: Path) -> None:
    with held(tmp_path):
        assert holder(tmp_path) == os.getpid()
        with pytest.raises(UserError, match=f"process {os.getpid()} already works with the identity"), held(tmp_path):
            pass
    assert holder(tmp_path) is None


def test_leave_ends_the_worker_of_the_home(tmp_path: Path) -> None:
    process = hold(tmp_path)
    assert holder(tmp_path) == process.pid
    assert leave(tmp_path, 60.0) == process.pid
    assert process.wait(60) == 0
    process.stdout.close()  # type: ignore[union-attr]
    with pytest.raises(UserError, match="no worker runs"):
        leave(tmp_path, 1.0)


def test_a_worker_that_does_not_end_is_told_of(tmp_path: Path) -> None:
    process = hold(tmp_path, "stubborn")
    try:
        with pytest.raises(OurFault, match=f"kill {process.pid}"):
            leave(tmp_path, 0.0)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]
    assert holder(tmp_path) is None  # the kernel's lock dies with its process


def test_a_home_that_can_not_be_used_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="choose another --home"), held(tmp_path / "file" / "home"):
        pass
