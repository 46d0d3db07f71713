"""A real PostgreSQL for tests and benchmarks, started by whoever needs it: an unprivileged process on a Unix socket.

No port is taken, nothing is installed, and everything lies in one temporary folder.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

_UNPRIVILEGED = ("postgres", "nobody")
# Durability is PostgreSQL's own business; without it a test's database costs milliseconds.
_FLEETING = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
# What deploy/docker-compose.yml gives its server, and the operator guide recommends: with the defaults, checkpoints come so
# often under load that most pages go to the log whole.
SERVING = {"shared_buffers": "512MB", "max_wal_size": "4GB", "checkpoint_timeout": "15min", "wal_compression": "lz4"}
_START_PATIENCE_S = 30.0
_START_RETRY_S = 0.2


def find_binaries() -> Path | None:
    """The folder that holds initdb and postgres: on PATH, or where Debian keeps them."""
    found = shutil.which("initdb")
    candidates = [Path(found).resolve().parent] if found else []
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in candidates if (folder / "postgres").exists()), None)


class Postgres:
    """A running server. `url(name)` names a database of it. `durable`: what is committed survives a power cut."""

    def __init__(self, binaries: Path, *, durable: bool = False) -> None:
        self._binaries = binaries
        self._settings = {"listen_addresses": "''", **(SERVING if durable else _FLEETING)}
        self._user = next(name for name in _UNPRIVILEGED if _exists(name)) if os.getuid() == 0 else None
        self._folder = Path(tempfile.mkdtemp(prefix="rollswarm-pg-"))
        if self._user is not None:
            account = pwd.getpwnam(self._user)
            os.chown(self._folder, account.pw_uid, account.pw_gid)
        self._data = self._folder / "data"
        self._run("initdb", "-D", self._data, "-U", "rollswarm", "-A", "trust", "-E", "UTF8", "--no-sync", "-N")
        self.start()

    @property
    def pid(self) -> int:
        """The id of the server's first process, whose children the others are."""
        return int((self._data / "postmaster.pid").read_text().split()[0])

    def start(self) -> None:
        """Start the server, or start it again after it was killed: it waits for what is left of its processes to end."""
        options = " ".join(f"-c {name}={value}" for name, value in self._settings.items())
        deadline = time.monotonic() + _START_PATIENCE_S
        while True:
            try:
                self._pg_ctl("start", "-w", "-l", self._folder / "log", "-o", f"-k {self._folder} {options}")
                return
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_START_RETRY_S)

    def url(self, database: str) -> str:
        return f"postgresql+asyncpg://rollswarm@/{database}?host={self._folder}"

    def create(self, database: str) -> str:
        """Make an empty database; its URL."""
        self._sql(f'CREATE DATABASE "{database}"')
        return self.url(database)

    def drop(self, database: str) -> None:
        self._sql(f'DROP DATABASE IF EXISTS "{database}" WITH (FORCE)')

    def stop(self) -> None:
        """End the server and forget its data."""
        self._pg_ctl("stop", "-m", "immediate", "-w")
        shutil.rmtree(self._folder, ignore_errors=True)

    def _sql(self, statement: str) -> None:
        self._run("psql", "-X", "-q", "-h", self._folder, "-U", "rollswarm", "-d", "postgres", "-c", statement)

    def _pg_ctl(self, *arguments: object) -> None:
        self._run("pg_ctl", "-D", self._data, *arguments)

    def _run(self, program: str, *arguments: object) -> None:
        """Output goes to a file: a server that inherits a pipe would keep it open."""
        output = self._folder / "output"
        with output.open("wb") as file:
            done = subprocess.run(
                [self._binaries / program, *map(str, arguments)],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self._folder,
                user=self._user,
                env={"PATH": os.defpath, "LC_ALL": "C", "HOME": str(self._folder)},
                timeout=60,
            )
        assert done.returncode == 0, f"{program} failed: {output.read_text(errors='replace')}"


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True
