"""A compose file, run without a container engine: every service's very command, environment, user, mounts and ports.

All services share one network namespace, where their names lead to 127.0.0.1, so ports are the file's own and clash with
nothing outside. What the images would bring (Python, PostgreSQL, Prometheus) is this machine's. Needs root.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from demo.postgres import find_binaries
from tests.container import Spec

ROOT = Path(__file__).parents[1]
READY_S = 600.0
_VARIABLE = re.compile(r"\$\{(\w+)(?:(:-|:\?)([^}]*))?\}")
# As the image's own entrypoint makes a database at the first start.
_POSTGRES = """\
set -eu
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  initdb -D "$PGDATA" -U "$POSTGRES_USER" --pwfile="$POSTGRES_PASSWORD_FILE" -A scram-sha-256 --no-sync >/dev/null
  echo "host all all all scram-sha-256" >> "$PGDATA/pg_hba.conf"
  export PGPASSWORD="$(cat "$POSTGRES_PASSWORD_FILE")"
  pg_ctl -D "$PGDATA" -w -o "-c listen_addresses= -k /tmp" start >/dev/null
  createdb -h /tmp -U "$POSTGRES_USER" "$POSTGRES_DB"
  pg_ctl -D "$PGDATA" -w stop >/dev/null
fi
exec postgres -D "$PGDATA" -c listen_addresses='*' -c fsync=off "$@"
"""


def interpolate(text: str, environment: Mapping[str, str]) -> str:
    """Compose's ${NAME}, ${NAME:-default} and ${NAME:?message}."""

    def value(found: re.Match[str]) -> str:
        name, kind, rest = found.groups()
        if environment.get(name):
            return environment[name]
        assert kind != ":?", f"{name} is not set: {rest}"
        return rest or ""

    return _VARIABLE.sub(value, text)


def entrypoints(dockerfile: Path) -> dict[str, list[str]]:
    """Of each target of a Dockerfile."""
    found, target = {}, ""
    for line in dockerfile.read_text().splitlines():
        if stage := re.match(r"FROM \S+ AS (\S+)", line):
            target = stage[1]
        elif line.startswith("ENTRYPOINT "):
            found[target] = json.loads(line.removeprefix("ENTRYPOINT "))
    return found


class Composition:
    """Use as a context: leaving it stops what it started, by id. `folder` takes volumes and logs."""

    def __init__(self, path: Path, folder: Path, environment: Mapping[str, str], run: Path) -> None:
        self.folder, self._run = folder, run
        self.services: dict[str, Any] = {}
        self.secrets: dict[str, Any] = {}
        self.add(path, environment)
        self._entrypoints = entrypoints(ROOT / "Dockerfile")
        self._namespace = f"rollswarm-test-{os.getpid()}"
        self._names: list[str] = []
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._may_end: set[str] = set()

    def add(self, path: Path, environment: Mapping[str, str]) -> None:
        """Take another file's services in."""
        file = yaml.safe_load(interpolate(path.read_text(), environment))
        self.services |= {name: {**service, "base": path.parent} for name, service in file["services"].items()}
        self.secrets |= file.get("secrets", {})

    def __enter__(self) -> Composition:
        subprocess.run(["ip", "netns", "add", self._namespace], check=True)
        subprocess.run(self._there(["ip", "link", "set", "lo", "up"]), check=True)
        return self

    def __exit__(self, *error: object) -> None:
        for name in reversed(list(self.running)):
            self.stop(name)
        subprocess.run(["ip", "netns", "delete", self._namespace], check=True)

    def name_hosts(self, *names: str) -> None:
        """Let these names lead to the services too, as DNS would."""
        self._names += names

    def start(self, name: str, *extra: str) -> None:
        """Start a service, and wait until its health check passes, if it has one."""
        argv = [*self._entrypoint(name), *self.services[name].get("command", ()), *extra]
        log = self.log(name).open("ab")
        with log:
            self.running[name] = subprocess.Popen(
                self._contained(name, argv), stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
        if "healthcheck" in self.services[name]:
            self.wait(f"{name} is healthy", lambda: self.healthy(name), READY_S)

    def healthy(self, name: str) -> bool:
        """Run the service's own health check once."""
        kind, *argv = self.services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        done = subprocess.run(self._contained(name, argv), capture_output=True, timeout=600)
        return done.returncode == 0

    def execute(self, name: str, argv: Sequence[str]) -> str:
        """`docker compose run --rm NAME …`: what it prints."""
        done = subprocess.run(self._contained(name, argv), capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def stop(self, name: str) -> int:
        """SIGTERM; SIGKILL if it doesn't end; the exit status."""
        process = self.running.pop(name)
        process.terminate()
        try:
            return process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def wait(self, what: str, condition: Callable[[], bool], timeout_s: float, ended: Sequence[str] = ()) -> None:
        """Wait until `condition`; fails if a service ends that never was in `ended`, or when time is out."""
        self._may_end.update(ended)
        deadline = time.monotonic() + timeout_s
        while not condition():
            for name, process in self.running.items():
                assert process.poll() is None or name in self._may_end, f"{name} ended: {self.last_words(name)}"
            assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}\n{self._all_last_words()}"
            time.sleep(0.5)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def last_words(self, name: str, lines: int = 12) -> str:
        return " | ".join(self.log(name).read_text(errors="replace").splitlines()[-lines:])

    def _all_last_words(self) -> str:
        return "\n".join(f"{name}: {self.last_words(name, 4)}" for name in self.running)

    def _entrypoint(self, name: str) -> list[str]:
        service = self.services[name]
        if "build" in service:
            return self._entrypoints[service["build"]["target"]]
        image = service["image"].partition(":")[0]
        return {
            "postgres": ["sh", "-c", _POSTGRES, "postgres"],
            "prom/prometheus": ["prometheus"],
            "nginx": ["nginx", "-g", "daemon off;"],
        }[image]

    def _contained(self, name: str, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` as this service."""
        service = self.services[name]
        work = self.folder / "roots" / f"{name}-{time.monotonic_ns()}"
        work.mkdir(parents=True)
        user = _user(str(service.get("user", "0:0")))
        spec = Spec(
            work=str(work),
            argv=argv,
            environment=self._environment(service),
            mounts=[self._volume(each, service["base"], user) for each in service.get("volumes", ())]
            + [(*self._secret(each), "ro") for each in service.get("secrets", ())],
            tmpfs=[entry.partition(":")[0] for entry in service.get("tmpfs", ())],
            files=self._image(),
            visible=sorted({str(ROOT), str(Path(sys.prefix).resolve()), str(Path(sys.base_prefix).resolve())}),
            user=user,
            read_only=bool(service.get("read_only")),
            folder="/",
        )
        script = [sys.executable, str(ROOT / "tests" / "container.py"), spec.to_json()]
        return self._there(["env", f"PYTHONPATH={ROOT}", *script])

    def _there(self, argv: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self._namespace, *argv]  # with a mount namespace of its own, too

    def _environment(self, service: Mapping[str, Any]) -> dict[str, str]:
        binaries = find_binaries()
        path = f"/opt/rollswarm/bin:{binaries}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        image = {"PATH": path, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}
        return {**image, **{name: str(value) for name, value in service.get("environment", {}).items()}}

    def _image(self) -> dict[str, str]:
        """What the images hold beside this machine's own files."""
        files = {
            f"/opt/rollswarm/bin/{role}": f'#!/bin/sh\nexec {sys.executable} -m {role}.main "$@"\n'
            for role in ("coordinator", "shardcast", "trainer", "worker")
        }
        files["/opt/rollswarm/bin/python"] = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
        hosts = " ".join(["localhost", *self.services, *self._names])
        return {**files, "/etc/hosts": f"127.0.0.1 {hosts}\n"}

    def _volume(self, entry: str, base: Path, user: tuple[int, int]) -> tuple[str, str, str]:
        source, target, *mode = entry.split(":")
        if source.startswith("./run"):
            return str(self._run / source.removeprefix("./run").lstrip("/")), target, *(mode or ["rw"])  # type: ignore[return-value]
        if source.startswith("."):
            return str((base / source).resolve()), target, *(mode or ["rw"])  # type: ignore[return-value]
        if not source.startswith("/"):  # a named volume takes the owner of the folder in the image
            path = self.folder / "volumes" / source
            if not path.exists():
                path.mkdir(parents=True)
                os.chown(path, *user)
            source = str(path)
        return source, target, (mode or ["rw"])[0]

    def _secret(self, name: str) -> tuple[str, str]:
        file = self.secrets[name]["file"]
        return str(self._run / file.removeprefix("./run/")), f"/run/secrets/{name}"


def _user(text: str) -> tuple[int, int]:
    if text[0].isdigit():
        user, _, group = text.partition(":")
        return int(user), int(group or user)
    account = pwd.getpwnam(text)
    return account.pw_uid, account.pw_gid
