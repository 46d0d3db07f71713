"""The adapter to `verifiers` against the library itself, in a virtual environment of its own."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_adapter_holds_against_the_real_library(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"{ROOT}[verifiers]"]
    for command in (install, [python, ROOT / "tests" / "integration" / "verifiers_check.py"]):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, timeout=1500)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.endswith("holds\n")
