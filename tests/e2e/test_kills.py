"""kill -9 of a random process, PostgreSQL among them, again and again: nothing receipted is lost, nothing trained twice, the
ledger balances, and the run is never stuck."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest

from demo.postgres import Postgres
from tests.network import Network
from tests.receipt_keeper import kept

_ROLES = ("coordinator", "verifier", "trainer", "worker", "postgresql")
_DATABASE = "kills"
_GOES_ON_S = 240.0


class KillRun:
    """A network on PostgreSQL, and somebody who kills its processes. `seed` decides whom and when."""

    def __init__(self, network: Network, postgres: Postgres, seed: int) -> None:
        self._network = network
        self._postgres = postgres
        self._rng = random.Random(seed)
        self.killed: Counter[str] = Counter()

    def begin(self) -> None:
        self._network.start_servers()
        self._network.start("worker", "--engine", "reference")
        self._network.wait("the run is under way", lambda: self._versions() >= 2, _GOES_ON_S)

    def kill_one(self, role: str | None = None) -> None:
        """Kill a process at some moment, start it again, and see the run go on, with all that it had promised."""
        role = role or self._rng.choice(_ROLES)
        moment = self._rollouts() + self._rng.randrange(6)
        self._network.wait("rollouts come in", lambda: self._rollouts() >= moment, _GOES_ON_S)
        self._kill(role)
        self.killed[role] += 1
        self.check()
        goal = self._versions() + 1
        self._network.wait(
            f"a version more after kill {self.killed.total()}, of {role}", lambda: self._versions() >= goal, _GOES_ON_S
        )
        print(f"kill {self.killed.total()}: {role}; version {goal}, {self._rollouts()} rollouts", flush=True)

    def wait_for_receipts(self) -> None:
        """Until the worker has work again, and with it the means to stop in good order."""
        before = len(kept(self._network.receipts))
        self._network.wait("the worker hands in", lambda: len(kept(self._network.receipts)) > before, _GOES_ON_S)

    def _kill(self, role: str) -> None:
        if role != "postgresql":
            self._network.kill(role)
            self._network.start(role, *(("--engine", "reference") if role == "worker" else ()))
            return
        server = psutil.Process(self._postgres.pid)
        for process in [server, *server.children(recursive=True)]:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._postgres.start()

    def check(self) -> None:
        """Every receipt's rollout is stored, and every invariant holds."""
        receipted = kept(self._network.receipts)
        lost = receipted - {row[0] for row in self._network.query("SELECT rollout_id FROM rollouts")}
        assert not lost, f"{len(lost)} of {len(receipted)} rollouts with a receipt are gone"
        self._network.check_invariants()

    def check_versions(self) -> None:
        """Versions are numbered without a gap, each with a digest of its own."""
        rows = self._network.query("SELECT version, manifest_digest FROM policy_versions ORDER BY version")
        assert [row[0] for row in rows] == list(range(len(rows)))
        assert len({row[1] for row in rows}) == len(rows)

    def _versions(self) -> int:
        return self._network.count("SELECT coalesce(max(version), -1) FROM policy_versions")

    def _rollouts(self) -> int:
        return self._network.count("SELECT count(*) FROM rollouts")


def _run(folder: Path, binaries: Path, kills: int, seed: int) -> KillRun:
    postgres = Postgres(binaries, durable=True)
    try:
        database = postgres.create(_DATABASE)
        with Network(folder, versions=1_000_000, database=database) as network:
            run = KillRun(network, postgres, seed)
            run.begin()
            for number in range(kills):
                run.kill_one(_ROLES[number] if number < len(_ROLES) else None)
            run.wait_for_receipts()
            assert network.stop("worker") == 0
            assert network.stop("trainer") == 0
            run.check()
            run.check_versions()
            assert kept(network.receipts), "receipts came at all"
            print(f"{dict(run.killed)}: {len(kept(network.receipts))} receipts, none lost", flush=True)
            return run
    finally:
        postgres.stop()


@pytest.mark.timeout(900)
def test_every_process_is_killed_and_nothing_is_lost(tmp_path: Path, postgres_binaries: Path) -> None:
    run = _run(tmp_path, postgres_binaries, 8, seed=5)
    assert set(run.killed) == set(_ROLES)


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_a_hundred_kills_of_random_processes_lose_nothing(tmp_path: Path, postgres_binaries: Path) -> None:
    run = _run(tmp_path, postgres_binaries, 100, seed=100)
    assert run.killed.total() == 100
