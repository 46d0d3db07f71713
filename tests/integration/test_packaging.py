"""What is published: a wheel and an sdist that hold the packages and nothing else, and that install where nothing else is."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"coordinator", "environments", "protocol", "protos", "recipes", "shardcast", "trainer", "worker"}
SCRIPTS = ("coordinator", "shardcast", "trainer", "worker")


def run(*command: object, status: int = 0) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd="/", timeout=900)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheel and sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.mark.timeout(1200)
def test_a_wheel_holds_the_packages_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == PACKAGES
    for needed in (
        "coordinator/dashboard/templates/status.html",
        "coordinator/migrations/versions/0001_the_first_schema.py",
        "protos/rollswarm/v1/worker_pb2.py",
        "recipes/ipo.toml",
        "worker/doctor/checks.py",
    ):
        assert needed in names
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "worker/main.py", "protos/rollswarm/v1/worker.proto"} <= held


@pytest.mark.timeout(1200)
def test_a_relay_installs_where_nothing_else_is_and_without_torch(built: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    binaries = tmp_path / "venv" / "bin"
    (wheel,) = built.glob("*.whl")
    run(binaries / "pip", "install", "--quiet", "--disable-pip-version-check", f"{wheel}[relay]")
    for script in SCRIPTS:
        assert run(binaries / script, "--version").startswith(f"{script} 0.1.0, protocol 1 to 2, build ")
        assert "Usage" in run(binaries / script, "--help")
    assert "--max-bandwidth-mbit" in run(binaries / "shardcast", "relay", "--help")
    said = run(binaries / "shardcast", "status", "http://127.0.0.1:9", status=1)
    assert "can't be asked" in said and "Traceback" not in said
    installed = run(
        binaries / "python", "-c", "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('grpc'))"
    )
    assert installed == "None None\n"
    missing = run(
        binaries / "worker", "join", "--coordinator", "http://127.0.0.1:9", "--home", tmp_path / "home", status=1
    )
    assert "rollswarm[worker]" in missing and "Traceback" not in missing
