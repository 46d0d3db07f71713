"""All processes of one run: `coordinator serve` (one or two), a verifier with recorded verdicts, a simulated trainer."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from pathlib import Path

from sqlalchemy import func, select, text

from benchmarks.coordinator.setting import Shape, write_run
from benchmarks.coordinator.watch import size
from coordinator.store import tables as t
from coordinator.store.database import Database
from demo.postgres import Postgres
from demo.presets import Ports
from demo.processes import Process, Processes

_READY_S = 60.0
_SETTLE_S = 120.0
_LOOK_S = 1.0
_DATABASE = "benchmark"


class Stand:
    """A run in `folder` on a database. `postgres`: None for SQLite. Use as a context."""

    def __init__(self, folder: Path, shape: Shape, postgres: Postgres | None) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._shape = shape
        self._postgres = postgres
        self.url = postgres.create(_DATABASE) if postgres else f"sqlite+aiosqlite:///{folder / 'run.db'}"
        self._processes = Processes(folder / "logs")
        self._running: dict[str, Process] = {}
        self.endpoints: list[str] = []
        self.run_id = ""

    def start(self) -> None:
        """Begin the run; at its return there is a version 0."""
        ports = self.add_replica("coordinator")
        terms = f"http://127.0.0.1:{ports.http}/.well-known/rollswarm.json"
        with urllib.request.urlopen(terms, timeout=30) as answer:
            self.run_id = json.load(answer)["run_id"]
        config = str(self._folder / "coordinator.toml")
        self._start("verifier", "benchmarks.coordinator.recorded", "--config", config)
        token = str(self._folder / "trainer.token")
        endpoint = f"127.0.0.1:{ports.trainer}"
        self._start("trainer", "benchmarks.coordinator.trainer", "--endpoint", endpoint, "--token-file", token)

    def add_replica(self, name: str) -> Ports:
        """One more `coordinator serve` on the same database."""
        ports = Ports.free()
        config = write_run(self._folder, name, self.url, self._shape, ports)
        self._start(name, "coordinator.main", "serve", "--config", str(config))
        self.endpoints.append(f"127.0.0.1:{ports.grpc}")
        return ports

    def _start(self, name: str, *arguments: str) -> None:
        process = self._processes.start(name, arguments)
        process.wait_ready(_READY_S)
        self._running[name] = process

    @property
    def pids(self) -> dict[str, int]:
        server = {} if self._postgres is None else {"postgresql": self._postgres.pid}
        return {name: process.popen.pid for name, process in self._running.items()} | server

    def stored_bytes(self) -> int:
        """What the database takes on the disk."""
        if self._postgres is None:
            return size(list(self._folder.glob("run.db*")))
        return asyncio.run(self._ask(text(f"SELECT pg_database_size('{_DATABASE}')")))

    def counts(self) -> dict[str, int]:
        """Rollouts received, judged, and served to the trainer."""
        tables = {"received": t.rollouts, "judged": t.verdicts, "consumed": t.consumptions}
        return {name: asyncio.run(self._ask(select(func.count()).select_from(table))) for name, table in tables.items()}

    def settle(self) -> None:
        """Wait until all that was received is judged, and the trainer takes no more: what waits would be another phase's load.

        Raises AssertionError if that takes too long.
        """
        deadline, before = time.monotonic() + _SETTLE_S, self.counts()
        while True:
            time.sleep(_LOOK_S)
            self.check()
            found = self.counts()
            if found["judged"] == found["received"] and found == before:
                return
            assert time.monotonic() < deadline, f"not settled after {_SETTLE_S:.0f} s: {found}"
            before = found

    async def _ask(self, statement: object) -> int:
        db = Database.open(self.url)
        try:
            async with db.read() as connection:
                return int((await connection.execute(statement)).scalar_one())  # type: ignore[call-overload]
        finally:
            await db.close()

    def check(self) -> None:
        """Raise AssertionError if a process has ended by itself."""
        for name, process in self._running.items():
            assert process.running, f"{name} ended: {process.last_words(12)}"

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *error: object) -> None:
        self._processes.__exit__(*error)
        if self._postgres is not None:
            self._postgres.drop(_DATABASE)
