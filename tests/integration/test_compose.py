"""deploy/docker-compose.yml, service by service, as local processes, from an empty folder until a rollout is trained."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from coordinator.calibration.report import to_toml
from demo.postgres import find_binaries
from deploy import setup
from tests.composition import ROOT, Composition
from tests.thresholds import BY_HAND
from tests.tiny_model import build_tiny_model

_HOST = "run.example.org"
_SMALL = {
    "scheduling": {"groups_per_batch": 2, "group_size": 4, "min_group": 2, "lease_term_s": 10.0},
    "verification": {"threads": 1},
    # A random model answers no sum: all rewards are alike.
    "trainer": {"versions": 2, "threads": 1, "keep_zero_advantage": True},
}


def _needs_root() -> None:
    if os.geteuid() == 0 and find_binaries() is not None:
        return
    assert not os.environ.get("CI"), "CI must run this test as root, with PostgreSQL installed"
    pytest.skip("this test makes namespaces and starts PostgreSQL: run it as root, with PostgreSQL installed")


def _set_up(folder: Path) -> Path:
    """What an operator does: setup.py, then calibration, then a look at the run file."""
    model = build_tiny_model(folder / "model")
    for path in model.iterdir():
        path.chmod(0o644)
    script = [sys.executable, str(ROOT / "deploy" / "setup.py"), "--folder", str(folder)]
    options = ["--host", _HOST, "--model", str(model), "--coordinator", f"{sys.executable} -m coordinator.main"]
    done = subprocess.run([*script, *options], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    run = folder / "run"
    (run / "calibration" / "thresholds.toml").write_text(to_toml(BY_HAND))
    (run / "run.toml").write_text(setup.with_settings((run / "run.toml").read_text(), _SMALL))
    setup.give_to_containers(run)
    # As a public certificate would be put there.
    public = run / "public-tls"
    public.mkdir()
    for source, target in (("server.pem", "fullchain.pem"), ("server.key", "privkey.pem")):
        (public / target).write_bytes((run / "tls" / source).read_bytes())
        os.chown(public / target, 101, 101)
    return run


def _variables(folder: Path) -> dict[str, str]:
    lines = (folder / ".env").read_text().splitlines()
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


@pytest.mark.timeout(3000)
def test_every_service_starts_as_the_compose_file_says_and_a_rollout_is_trained(tmp_path: Path) -> None:
    _needs_root()
    tmp_path.chmod(0o755)  # containers' users reach their mounts through it
    run = _set_up(tmp_path)
    variables = _variables(tmp_path) | {"VERIFIER_THREADS": "1", "TRAINER_THREADS": "1"}
    assert tomllib.loads((run / "run.toml").read_text())["run"]["trainer_key"] == variables["TRAINER_KEY"]
    with Composition(ROOT / "deploy" / "docker-compose.yml", tmp_path, variables, run) as services:
        services.name_hosts(_HOST)
        for name in ("postgres", "coordinator", "origin", "relay", "verifier", "trainer"):
            services.start(name)
        told = re.search(r"worker join --coordinator (\S+)", services.log("coordinator").read_text())
        assert told is not None, services.last_words("coordinator")
        worker = {"COORDINATOR_URL": told[1]}
        services.add(ROOT / "deploy" / "worker" / "docker-compose.yml", worker)
        services.start("worker", "--engine", "reference", "--json")
        trainer = services.running["trainer"]
        services.wait("the trainer publishes its versions", lambda: trainer.poll() is not None, 1500, ended=["trainer"])
        assert trainer.poll() == 0, services.last_words("trainer")
        assert int(_query(services, "SELECT count(*) FROM consumptions WHERE trained")) >= 16
        assert int(_query(services, "SELECT max(version) FROM policy_versions")) == 2
        assert _query(services, "SELECT count(*) FROM rollouts WHERE state = 'rejected'") == "0"
        assert services.stop("worker") == 0, services.last_words("worker")
        for name in ("postgres", "coordinator", "origin", "relay"):
            assert services.healthy(name), services.last_words(name)
        _look_from_outside(services)


def _look_from_outside(services: Composition) -> None:
    """Prometheus sees all three by its own configuration, and the proxy serves status page and weights, but no metrics."""
    services.start("proxy")
    services.start("prometheus")
    services.wait("Prometheus scrapes everything", lambda: _ask(services, _TARGETS) == "coordinator origin relay", 300)
    services.wait("the proxy answers", lambda: _ask(services, _PAGES.format(host=_HOST)) == "200 200 404", 300)


_TARGETS = """
import json, urllib.request as u
found = json.load(u.urlopen("http://127.0.0.1:9090/api/v1/targets"))["data"]["activeTargets"]
print(*sorted(each["labels"]["job"] for each in found if each["health"] == "up"))
"""
_PAGES = """
import urllib.error, urllib.request as u
def status(path):
    try:
        return u.urlopen("https://{host}:8443" + path).status
    except urllib.error.HTTPError as error:
        return error.code
print(status("/"), status("/v1/head"), status("/metrics"))
"""


def _ask(services: Composition, program: str) -> str:
    """Run a program where the services are; "" while it fails."""
    try:
        return services.execute("origin", ["python", "-c", program]).strip()
    except AssertionError:
        return ""


def _query(services: Composition, statement: str) -> str:
    """Ask PostgreSQL as the coordinator does: over TCP, with the password of the secret."""
    command = ["psql", "-X", "-A", "-t", "-h", "postgres", "-U", "rollswarm", "-d", "rollswarm", "-c", statement]
    services.services["coordinator"].setdefault("environment", {})
    return services.execute("coordinator", command).strip()
