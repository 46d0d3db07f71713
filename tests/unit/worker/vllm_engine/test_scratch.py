"""The folders of engines that are gone are cleared, those of engines that run are not."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from worker.vllm_engine.scratch import Scratch

ROOT = Path(__file__).parents[4]
_SCRIPT = """
import os
from worker.vllm_engine.scratch import Scratch

scratch = Scratch()
print(scratch.path, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left_by_a_killed_process(temporary: Path) -> Path:
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == -9, done.stderr
    return Path(done.stdout.strip())


def test_what_a_killed_process_left_is_cleared_and_what_is_in_use_stays(temporary: Path) -> None:
    left = left_by_a_killed_process(temporary)
    assert left.parent == temporary and left.is_dir()
    first = Scratch()
    second = Scratch()
    assert not left.exists()
    assert first.path.is_dir() and second.path.is_dir() and first.path != second.path
    first.remove()
    assert list(temporary.iterdir()) == [second.path]
    second.remove()


def test_what_is_not_ours_to_clear_stays(temporary: Path) -> None:
    (temporary / "rollswarm-engine-being-made").mkdir()  # no lock yet
    (temporary / "rollswarm-engine-a-file").touch()
    (temporary / "elsewhere").mkdir()
    (temporary / "elsewhere" / "lock").touch()
    (temporary / "rollswarm-engine-a-link").symlink_to(temporary / "elsewhere")
    Scratch().remove()
    assert len(list(temporary.iterdir())) == 4
    assert (temporary / "elsewhere" / "lock").exists()


def test_only_its_user_reads_it(temporary: Path) -> None:
    scratch = Scratch()
    assert scratch.path.stat().st_mode & 0o777 == 0o700
    scratch.remove()


@pytest.mark.parametrize(("length", "fits"), [(70, True), (71, False)])
def test_a_path_too_long_for_a_socket_is_noticed(temporary: Path, length: int, fits: bool) -> None:
    scratch = Scratch()
    made, scratch.path = scratch.path, Path("/" + "x" * (length - 1))
    assert scratch.holds_sockets is fits
    scratch.path = made
    scratch.remove()
