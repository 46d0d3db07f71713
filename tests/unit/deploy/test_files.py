"""deploy/ by its own linters, and by what every service must say: limits, health, restart, no root, nothing writable."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from demo.postgres import SERVING

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
COMPOSE = sorted(DEPLOY.rglob("docker-compose.yml"))
# They listen nowhere, so nothing can be asked; alerts watch the work that would pile up.
WITHOUT_HEALTH = {"verifier", "verifier-gpu", "trainer", "trainer-gpu", "proxy", "worker"}


def run(*command: object, folder: Path = ROOT) -> str:
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tool(name: str) -> Path:
    """A linter of the `dev` extra."""
    return Path(sys.executable).parent / name


def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        assert not os.environ.get("CI"), "CI must lint the alerts: install Prometheus"
        pytest.skip("no promtool here: install Prometheus to lint alerts and dashboards")
    return found


def test_compose_files_follow_the_specification() -> None:
    assert len(COMPOSE) == 3
    run(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", *COMPOSE)


def test_yaml_is_clean() -> None:
    files = [path for kind in ("*.yml", "*.yaml") for path in DEPLOY.rglob(kind)]
    run(tool("yamllint"), "--strict", "-c", DEPLOY / ".yamllint.yml", *files)


def test_the_dockerfile_is_clean() -> None:
    run(tool("hadolint"), ROOT / "Dockerfile")


def test_shell_scripts_parse() -> None:
    scripts = list(DEPLOY.rglob("*.sh"))
    assert scripts
    for path in scripts:
        run("bash", "-n", path)


def services() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in COMPOSE:
        yield from yaml.safe_load(path.read_text())["services"].items()


@pytest.mark.parametrize(
    ("name", "service"), list(services()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_service_is_guarded_and_bounded(name: str, service: dict[str, Any]) -> None:
    assert service["user"] not in ("root", "0", "0:0")
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["restart"] in ("unless-stopped", "on-failure")
    assert {"cpus", "memory"} <= service["deploy"]["resources"]["limits"].keys()
    assert ("healthcheck" in service) != (name in WITHOUT_HEALTH)
    assert ":latest" not in service["image"] and ":" in service["image"]


def worker_entrypoint() -> list[str]:
    service = yaml.safe_load((DEPLOY / "worker/docker-compose.yml").read_text())["services"]["worker"]
    assert service["restart"] == "on-failure"
    return [part.replace("$$", "$") for part in service["entrypoint"]]


def fake_worker(folder: Path, script: str) -> dict[str, str]:
    """The environment in which `worker` is this script."""
    (folder / "worker").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "worker").chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize(("status", "told"), [(0, 0), (1, 1), (2, 0), (137, 137)])
def test_a_banned_worker_is_not_started_again(tmp_path: Path, status: int, told: int) -> None:
    environment = fake_worker(tmp_path, f'echo "$1|$2"; exit {status}')
    command = [*worker_entrypoint(), "join", "two words"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (told, "join|two words\n")


def test_a_worker_that_is_stopped_finishes_first(tmp_path: Path) -> None:
    environment = fake_worker(
        tmp_path, f"trap 'sleep 0.3; touch {tmp_path}/finished; exit 0' TERM; echo begun; while :; do sleep 0.1; done"
    )
    process = subprocess.Popen(worker_entrypoint(), env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as said:
        assert said.readline() == "begun\n"
        process.terminate()
        process.wait(timeout=60)
        assert (tmp_path / "finished").exists()


def test_only_the_services_that_need_a_secret_have_it() -> None:
    file = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
    holders = {
        secret: {name for name, service in file["services"].items() if secret in service.get("secrets", ())}
        for secret in file["secrets"]
    }
    assert holders["postgres_password"] == {"postgres"}
    assert holders["pgpass"] == {"coordinator", "verifier", "verifier-gpu"}
    mounts = {name: " ".join(service.get("volumes", ())) for name, service in file["services"].items()}
    assert {name for name, text in mounts.items() if "trainer.key" in text} == {"trainer", "trainer-gpu"}
    assert {name for name, text in mounts.items() if "coordinator.key" in text} == {"coordinator"}


def test_the_database_is_set_as_it_was_measured() -> None:
    """The coordinator's benchmark and the operator guide go by the same settings."""
    command = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]["postgres"]["command"]
    settings = dict(each.split("=") for each in command if each != "-c")
    measured = {name: value for name, value in settings.items() if name != "max_connections"}
    assert measured == SERVING
    guide = (DEPLOY.parent / "docs" / "operator-guide.md").read_text()
    assert all(f"`{name} = {value}`" in guide for name, value in measured.items())


def test_prometheus_takes_its_files() -> None:
    folder = DEPLOY / "prometheus"
    run(promtool(), "check", "config", "--syntax-only", folder / "prometheus.yml")
    run(promtool(), "check", "rules", folder / "rules.yml")
    run(promtool(), "test", "rules", "rules_test.yml", folder=folder)


def test_every_query_of_a_dashboard_is_one(tmp_path: Path) -> None:
    boards = [json.loads(path.read_text()) for path in DEPLOY.glob("grafana/dashboards/*.json")]
    queries = [target["expr"] for board in boards for panel in board["panels"] for target in panel["targets"]]
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(queries)]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": rules}]}))
    assert len(rules) > 20
    run(promtool(), "check", "rules", path)


def manifests(folder: Path) -> list[dict[str, Any]]:
    documents = [each for path in sorted(folder.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())]
    return [each for each in documents if each["kind"] != "Kustomization"]


def test_kustomize_builds_every_variant() -> None:
    listed = yaml.safe_load((DEPLOY / "kubernetes/base/kustomization.yaml").read_text())["resources"]
    files = {path.name for path in (DEPLOY / "kubernetes/base").glob("*.yaml")} - {"kustomization.yaml"}
    assert set(listed) == files
    if shutil.which("kubectl") is not None:
        for variant in ("base", "gpu", "keda"):
            built = list(yaml.safe_load_all(run("kubectl", "kustomize", DEPLOY / "kubernetes" / variant)))
            assert len(built) == 14, variant


def test_every_pod_is_guarded_bounded_and_probed() -> None:
    pods = [each for each in manifests(DEPLOY / "kubernetes/base") if each["kind"] in ("Deployment", "StatefulSet")]
    assert len(pods) == 4
    for each in pods:
        spec = each["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["automountServiceAccountToken"] is False
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert {"cpu", "memory"} <= container["resources"]["limits"].keys()
        for container in spec["containers"]:
            probes = {"startupProbe", "readinessProbe", "livenessProbe"} & container.keys()
            assert len(probes) == (3 if "ports" in container else 0), container["name"]


def test_systemd_takes_the_units() -> None:
    units = list(DEPLOY.rglob("*.service"))
    assert len(units) == 2
    if shutil.which("systemd-analyze") is None:
        for unit in units:
            assert "ExecStart=/opt/rollswarm/bin/" in unit.read_text()
        return
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, timeout=60)
    mine = [line for line in done.stderr.splitlines() if "rollswarm-" in line and "is not executable" not in line]
    assert not mine


def test_every_dependency_of_an_image_is_pinned_by_hash() -> None:
    for path in sorted((DEPLOY / "requirements").glob("*.txt")):
        if path.stem == "constraints":
            continue
        pins = re.findall(r"^[a-z0-9][\w.\[\]-]*==\S+(?: ; [^\\]+)? \\$", path.read_text(), re.MULTILINE)
        hashes = re.findall(r"^ +--hash=sha256:[0-9a-f]{64}", path.read_text(), re.MULTILINE)
        assert pins and len(hashes) >= len(pins), path.name
        assert ("torch==2.13.0" in path.read_text()) == (path.stem != "relay"), path.name


def required(*extras: str) -> set[str]:
    """Names that pyproject.toml asks for with these extras, those within extras too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names: set[str] = set()
    for line in (
        *project["dependencies"],
        *(each for extra in extras for each in project["optional-dependencies"][extra]),
    ):
        requirement = Requirement(line)
        if requirement.name == "rollswarm":
            names |= required(*requirement.extras)
        else:
            names.add(canonicalize_name(requirement.name))
    return names


@pytest.mark.parametrize(
    ("image", "extras"),
    [
        ("relay", ()),
        ("coordinator", ("coordinator",)),
        ("trainer", ("trainer",)),
        ("worker", ("worker",)),
        ("calibrate", ("worker", "coordinator")),
    ],
)
def test_an_image_installs_all_that_its_role_asks_for(image: str, extras: tuple[str, ...]) -> None:
    """Images install the pins and nothing else."""
    pins = (DEPLOY / "requirements" / f"{image}.txt").read_text()
    assert required(*extras) <= set(re.findall(r"^([a-z0-9][a-z0-9.-]*)(?:\[[^]]*\])?==", pins, re.MULTILINE))


@pytest.mark.parametrize("module", ["math_verify", "pyarrow", "reasoning_gym"])
def test_the_trainer_has_what_scores_the_environments(module: str) -> None:
    """It evaluates in its own process: `evaluate_every`, `trainer evaluate`."""
    assert module.replace("_", "-") in required("trainer")


def ancestry(stage: str) -> str:
    """What the Dockerfile says of a stage and of all that it is built on."""
    stages = re.findall(
        r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM |\Z)", (ROOT / "Dockerfile").read_text(), re.MULTILINE | re.DOTALL
    )
    found = {name: (base, body) for base, name, body in stages}
    if stage not in found:
        return ""
    base, body = found[stage]
    return ancestry(base) + body


@pytest.mark.parametrize("image", ["coordinator", "trainer", "calibrate"])
def test_what_has_no_wheel_is_compiled_where_a_compiler_is(image: str) -> None:
    assert "pycosat==" in (DEPLOY / "requirements" / f"{image}.txt").read_text()  # published as source alone
    assert "gcc" in ancestry(f"installed-{image}")


@pytest.mark.parametrize("image", ["worker", "calibrate"])
def test_an_image_with_vllm_can_compile_kernels_as_it_runs(image: str) -> None:
    assert "gcc" in ancestry(image)


def test_an_image_has_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    dockerfile, admitted = (ROOT / "Dockerfile").read_text(), (ROOT / ".dockerignore").read_text().splitlines()
    for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]:
        name = pattern.removesuffix("*")
        assert f"COPY {name} {name}\n" in dockerfile and f"!{name}" in admitted, name
