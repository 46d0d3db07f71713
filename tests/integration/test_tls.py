"""A run that others join: certificates by `coordinator init`, the URL that `serve` prints, a worker's command by it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.calibration.report import to_toml
from demo.processes import Processes
from shardcast.discovery import Coordinator
from tests.thresholds import BY_HAND
from tests.tiny_model import build_tiny_model

_READY_S = 120.0


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=120)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """What `init` wrote for a machine that others reach as 127.0.0.1, on free ports."""
    model = build_tiny_model(tmp_path / "model")
    made = _run(
        *("coordinator.main", "init", str(tmp_path / "run"), "--model", str(model), "--advertise-host", "127.0.0.1")
    )
    assert made.returncode == 0, made.stderr
    (tmp_path / "run" / "calibration").mkdir()
    (tmp_path / "run" / "calibration" / "thresholds.toml").write_text(to_toml(BY_HAND))
    path = tmp_path / "run" / "run.toml"
    path.write_text(re.sub(r"_port = \d+", "_port = 0", path.read_text()))
    return path


async def test_a_stranger_joins_by_the_url_that_serve_prints(run_file: Path, tmp_path: Path) -> None:
    with Processes(tmp_path / "logs") as processes:
        serving = processes.start("coordinator", ["coordinator.main", "serve", "--config", str(run_file)])
        fields = serving.wait_ready(_READY_S)
        assert fields["url"].startswith("https://")
        join = re.search(r"--coordinator (\S+)", serving.log.read_text())
        assert join is not None
        url = join[1]
        home = ["--home", str(tmp_path / "home")]
        assert _run("worker.main", "identity", *home).returncode == 0
        status = _run("worker.main", "status", "--coordinator", url, *home)
        assert status.returncode == 0, status.stderr
        assert "standing   good" in status.stdout
        plain = _run("worker.main", "status", "--coordinator", url.partition("#")[0], *home)
        assert plain.returncode == 2 and "#sha256=" in plain.stderr and "Traceback" not in plain.stderr
        assert await Coordinator(url).required() == set()


def test_a_certificate_is_renewed_by_the_same_authority(run_file: Path) -> None:
    ca = (run_file.parent / "tls" / "ca.pem").read_bytes()
    renewed = _run("coordinator.main", "certificate", "--config", str(run_file), "--name", "run.example")
    assert renewed.returncode == 0, renewed.stderr
    assert "run.example" in renewed.stdout and "#sha256=" in renewed.stdout
    assert (run_file.parent / "tls" / "ca.pem").read_bytes() == ca


def test_plaintext_for_others_is_refused_at_the_start(run_file: Path) -> None:
    text = re.sub(r"(?m)^(certificate|certificate_key|ca) = .*\n", "", run_file.read_text())
    run_file.write_text(text)
    refused = _run("coordinator.main", "serve", "--config", str(run_file))
    assert refused.returncode == 2
    assert "coordinator certificate" in refused.stderr and "insecure = true" in refused.stderr
