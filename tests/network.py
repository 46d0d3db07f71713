"""A whole network of real processes on loopback, for integration and end-to-end tests."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from coordinator.calibration.report import to_toml
from coordinator.operate import make_token
from coordinator.operators import Role
from demo.presets import Ports
from demo.processes import Process, Processes
from protocol import keyfile
from tests.thresholds import BY_HAND
from tests.tiny_model import EOS_TOKEN_ID, build_tiny_model

READY_S = 90.0
PARITY = """
[[environments]]
name = "parity"
kind = "tests.parity:Parity"
max_tokens = 12
"""


class Network:
    """Starts roles by name; state lives in `folder`. Use as a context: leaving it stops what it started.

    `settings`: lines for the run file's [scheduling] or sections behind it; `trainer`: lines for its [trainer];
    `environments`: the [[environments]].
    """

    def __init__(
        self,
        folder: Path,
        *,
        versions: int = 4,
        settings: str = "",
        database: str = "",
        trainer: str = "",
        environments: str = PARITY,
    ) -> None:
        """`database`: URL of an empty PostgreSQL database; SQLite in the folder if there is none."""
        self.folder = folder
        self.receipts = folder / "receipts.log"  # of the role `worker`, by tests.receipt_keeper
        self.database = database or f"sqlite+aiosqlite:///{folder / 'run.db'}"
        folder.mkdir(parents=True, exist_ok=True)
        self.ports = Ports.free()
        self.model = build_tiny_model(folder / "model")
        self.trainer_key = keyfile.load_or_create(folder / "trainer.key")[0].key_id
        self.config = folder / "run.toml"
        self.config.write_text(self._run_file(versions, settings, environments) + trainer)
        (folder / "thresholds.toml").write_text(to_toml(BY_HAND))
        self.url = f"http://127.0.0.1:{self.ports.http}"
        self._processes = Processes(
            folder / "logs",
            {
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "OMP_WAIT_POLICY": "PASSIVE",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "ROLLSWARM_WORKER_CONCURRENCY": "8",
            },
        )
        self.running: dict[str, Process] = {}
        self._tokens = 0
        self._viewer = ""

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *error: object) -> None:
        self._processes.__exit__(*error)

    def _run_file(self, versions: int, settings: str, environments: str) -> str:
        return f"""
[run]
name = "test"
trainer_key = "{self.trainer_key}"
database = "{self.database}"
[model]
name = "tiny"
path = "model"
[sampling]
temperature = 1.0
eos_token_ids = [{EOS_TOKEN_ID}]
[scheduling]
groups_per_batch = 2
group_size = 4
min_group = 2
max_staleness = 2
lease_term_s = 4.0
group_deadline_s = 60.0
probation_rollouts = 8
{settings}
{environments}
[verification]
max_strikes = 3
claim_term_s = 10.0
thresholds_file = "thresholds.toml"
[server]
grpc_port = {self.ports.grpc}
http_port = {self.ports.http}
trainer_port = {self.ports.trainer}
[shardcast]
relays = ["http://127.0.0.1:{self.ports.relay}"]
[trainer]
coordinator = "127.0.0.1:{self.ports.trainer}"
origin = "http://127.0.0.1:{self.ports.origin}"
versions = {versions}
learning_rate = 1e-3
checkpoint_every = 2
"""

    def start(self, role: str, *extra: str) -> Process:
        """Start `origin`, `relay`, `coordinator`, `verifier`, `trainer`, `worker…` or `cheater:<attack>`."""
        process = self._processes.start(role.replace(":", "-"), [*self._arguments(role), *extra])
        self.running[role] = process
        if role in ("origin", "relay", "coordinator", "verifier"):
            process.wait_ready(READY_S)
        return process

    def start_team(self, size: int) -> Process:
        """The trainer on so many processes."""
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={size}", "-m"]
        process = self._processes.start("trainer", [*launcher, *self._arguments("trainer")])
        self.running["trainer"] = process
        return process

    def start_servers(self) -> None:
        for role in ("origin", "relay", "coordinator", "verifier", "trainer"):
            self.start(role)

    def kill(self, role: str) -> None:
        """kill -9, children included."""
        self.running.pop(role).kill()

    def stop(self, role: str, grace_s: float = 20.0) -> int:
        """SIGTERM, and SIGKILL after `grace_s`; the exit status."""
        return self.running.pop(role).stop(grace_s)

    def _arguments(self, role: str) -> list[str]:
        ports, folder = self.ports, self.folder
        serve = ["--trainer-key", self.trainer_key, "--data-dir", str(folder / role)]
        if role == "origin":
            return ["shardcast.main", role, *serve, "--port", str(ports.origin), "--coordinator", self.url]
        if role == "relay":
            source = ["--origin", f"http://127.0.0.1:{ports.origin}", "--host", "127.0.0.1"]
            return ["shardcast.main", role, *serve, *source, "--port", str(ports.relay)]
        if role == "coordinator":
            return ["coordinator.main", "serve", "--config", str(self.config)]
        if role.startswith("verifier"):
            return ["coordinator.main", "verify", "--config", str(self.config)]
        if role == "trainer":
            return ["trainer.main", "run", "--config", str(self.config)]
        home = ["--coordinator", self.url, "--home", str(folder / role.replace(":", "-")), "--name", role]
        if role.startswith("cheater:"):
            attack = role.partition(":")[2]
            return ["tests.adversary.cheating_worker", "--attack", attack, "--engine", "reference", *home]
        return ["tests.receipt_keeper", str(self.receipts), "join", *home, "--json"]

    def key_id(self, role: str) -> str:
        """The key id of a worker."""
        return keyfile.load(self.folder / role.replace(":", "-") / "identity.key").key_id

    def token(self, role: Role) -> str:
        """A new token of this role; the coordinator must have begun its run."""
        self._tokens += 1
        name = f"{role.name.lower()} {self._tokens}"
        return asyncio.run(make_token(self.database, name, role, None))

    def status(self) -> dict[str, Any] | None:
        """The coordinator's JSON status as an operator sees it, None while it is away."""
        if not self._viewer:
            self._viewer = self.token(Role.VIEWER)
        headers = {"Authorization": f"Bearer {self._viewer}"}
        try:
            request = urllib.request.Request(f"{self.url}/api/v1/status", headers=headers)
            with urllib.request.urlopen(request, timeout=5) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except OSError:
            return None

    def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Read from the run's database; `?` in the statement stands for a value."""
        if self.database.startswith("postgresql"):
            return asyncio.run(self._ask(statement, values))
        connection = sqlite3.connect(f"file:{self.folder / 'run.db'}?mode=ro", uri=True, timeout=30)
        try:
            return connection.execute(statement, values).fetchall()
        finally:
            connection.close()

    async def _ask(self, statement: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        import asyncpg

        for number in range(len(values)):
            statement = statement.replace("?", f"${number + 1}", 1)
        connection = await asyncpg.connect(self.database.replace("postgresql+asyncpg", "postgresql"))
        try:
            return [tuple(row) for row in await connection.fetch(statement, *values)]
        finally:
            await connection.close()

    def count(self, statement: str, *values: Any) -> int:
        return int(self.query(statement, *values)[0][0] or 0)

    def wait(
        self, what: str, condition: Callable[[], bool], timeout_s: float = 120.0, allow_end: tuple[str, ...] = ()
    ) -> None:
        """Wait until `condition`; fails if a role ends that is not in `allow_end`, or time runs out."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            for role, process in self.running.items():
                if not process.running and role not in allow_end:
                    raise AssertionError(f"{role} ended with {process.popen.returncode}: {process.last_words(12)}")
            if time.monotonic() > deadline:
                logs = "\n".join(f"{role}: {process.last_words(4)}" for role, process in self.running.items())
                raise AssertionError(f"not within {timeout_s:.0f} s: {what}\n{logs}")
            os.sched_yield()
            time.sleep(0.1)

    def check_invariants(self, max_staleness: int = 2) -> None:
        """What always holds, read from the database."""
        nothing_twice = "SELECT count(*) - count(DISTINCT rollout_id) FROM consumptions"
        assert self.count(nothing_twice) == 0
        unverified = (
            "SELECT count(*) FROM consumptions c LEFT JOIN verdicts v USING (rollout_id) "
            "WHERE v.outcome IS NULL OR v.outcome != 'accepted'"
        )
        assert self.count(unverified) == 0
        assert self.count("SELECT coalesce(max(staleness), 0) FROM consumptions") <= max_staleness
        unbalanced = (
            "SELECT count(*) FROM workers w WHERE w.credits != (SELECT coalesce(sum(amount), 0) FROM ledger l "
            "WHERE l.worker_id = w.worker_id AND l.kind = 'credit')"
        )
        assert self.count(unbalanced) == 0
        two_live = (
            "SELECT count(*) FROM "
            "(SELECT sample_id FROM leases WHERE state = 'live' GROUP BY 1 HAVING count(*) > 1) AS twice"
        )
        assert self.count(two_live) == 0
        uncounted = (
            "SELECT count(*) FROM rollouts r WHERE state IN ('rejected', 'dropped') "
            "AND NOT EXISTS (SELECT 1 FROM drops d WHERE d.rollout_id = r.rollout_id)"
        )
        assert self.count(uncounted) == 0
