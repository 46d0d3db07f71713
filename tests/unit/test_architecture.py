"""What the tree promises about itself: who imports whom, what loads when, and that generated files are current."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROLES = ("coordinator", "worker", "trainer", "shardcast")
PACKAGES = (*ROLES, "environments", "protocol", "recipes")
IMPORT_NAMES = (*PACKAGES, "protos")
# What one role offers to others.
CLIENTS = {
    "coordinator.client",
    "coordinator.trust",
    "coordinator.trainer_token",
    "shardcast.client",
    "shardcast.publish",
}
# Modules that put processes together, and so may know several roles.
ASSEMBLERS = {"main", "join", "run", "status_command"}
HEAVY = {"torch", "vllm", "grpc", "sqlalchemy", "transformers", "aiohttp", "libtorrent"}


def modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), path


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Absolute names of the modules that a file imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            # `from package import module` imports the module; a name that is none does no harm here.
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def uses(path: Path, package: str) -> bool:
    return any(inside(name, package) for name in imports(path))


def test_the_checks_see_imports() -> None:
    assert uses(ROOT / "protocol" / "wire.py", "protos")
    assert "coordinator.client" in imports(ROOT / "worker" / "loop.py")
    assert {name for name, _ in modules("worker")} >= {"worker", "worker.main", "worker.vllm_engine.engine"}


def test_protocol_knows_nobody_and_only_its_wire_knows_protos() -> None:
    for name, path in modules("protocol"):
        for other in (*ROLES, "environments", "demo"):
            assert not uses(path, other), f"{name} imports {other}"
        assert name == "protocol.wire" or not uses(path, "protos"), f"{name} imports protos"


def test_environments_know_the_protocol_alone() -> None:
    for name, path in modules("environments"):
        for other in (*ROLES, "protos", "demo"):
            assert not uses(path, other), f"{name} imports {other}"


@pytest.mark.parametrize("role", ROLES)
def test_a_role_uses_another_by_the_clients_it_offers(role: str) -> None:
    for name, path in modules(role):
        if name.rpartition(".")[2] in ASSEMBLERS:
            continue
        for imported in imports(path):
            foreign = next((other for other in ROLES if other != role and inside(imported, other)), None)
            if foreign is None or imported == foreign:
                continue
            assert any(inside(imported, client) for client in CLIENTS), f"{name} imports {imported}"


def test_shardcast_serves_every_role_and_uses_none() -> None:
    for name, path in modules("shardcast"):
        for other in ("coordinator", "worker", "trainer", "environments"):
            assert not uses(path, other), f"{name} imports {other}"


def test_nothing_but_the_two_engines_imports_vllm() -> None:
    users = {name for package in (*PACKAGES, "demo") for name, path in modules(package) if uses(path, "vllm")}
    assert users, "the check looks at the right files"
    prefill = "coordinator.verification.vllm_prefill"
    assert all(inside(name, "worker.vllm_engine") or name == prefill for name in users), users


def test_the_product_never_imports_its_demo_or_tests() -> None:
    for package in PACKAGES:
        for name, path in modules(package):
            assert not uses(path, "demo") and not uses(path, "tests"), name


def loaded_by(code: str) -> set[str]:
    """Names in sys.modules of a fresh interpreter after `code`."""
    script = f"{code}\nimport json, sys\nprint('\\n' + json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=120, env=_environment()
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_the_protocol_loads_nothing_heavy() -> None:
    names = [name for name, _ in modules("protocol")]
    loaded = loaded_by("\n".join(f"import {name}" for name in names))
    assert set(names) <= loaded
    assert loaded & HEAVY == set()


def test_help_loads_nothing_heavy() -> None:
    # One interpreter for all four: what one of them loads would be seen.
    code = """
import contextlib, io, importlib, sys
for role in ("coordinator", "worker", "trainer", "shardcast"):
    module = importlib.import_module(role + ".main")
    sys.argv = [role, "--help"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        module.main()
    assert "Usage" in out.getvalue(), (role, out.getvalue())
"""
    loaded = loaded_by(code)
    assert loaded & HEAVY == set()
    assert "rich" not in loaded  # it alone would take as long as all the rest


def test_generated_stubs_are_current(tmp_path: Path) -> None:
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").rglob("*.proto"))
    assert sources
    done = subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-I", "."),
            *(f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", f"--grpc_python_out={tmp_path}"),
            *sources,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    generated = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.py*")}
    assert len(generated) == 3 * len(sources)
    for path, text in generated.items():
        assert (ROOT / path).read_text() == text, f"{path} is not what protoc makes of its source: `make protos`"


def test_protos_are_clean() -> None:
    buf = Path(sys.executable).parent / "buf"
    done = subprocess.run([buf, "lint"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_dependency_owns_one_of_our_import_names() -> None:
    distributions = importlib.metadata.packages_distributions()
    for name in IMPORT_NAMES:
        owners = set(distributions.get(name, ()))
        assert owners <= {"rollswarm"}, f"{owners} also install a package {name!r}"


def test_every_package_says_what_it_is() -> None:
    for package in PACKAGES:
        for name, path in modules(package):
            if path.parent.name == "versions":
                continue
            assert ast.get_docstring(ast.parse(path.read_text())), f"{name} has no docstring"


def test_no_module_reads_the_environment_but_those_that_configure() -> None:
    allowed = {"worker.config", "coordinator.verification.vllm_prefill"}
    readers = set()
    for package in PACKAGES:
        for name, path in modules(package):
            text = path.read_text()
            if "os.environ" in text or "os.getenv" in text:
                readers.add(name)
    unexpected = {name for name in readers - allowed if not inside(name, "worker.vllm_engine")}
    known = {
        "environments.jail",
        "environments.sandbox",
        "environments.scorer",
        "worker.main",
        "worker.join",
        "trainer.main",
    }
    assert unexpected <= known, unexpected
