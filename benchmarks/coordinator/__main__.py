"""`python -m benchmarks.coordinator`: rollouts taken in per second, beside a bare gRPC echo of the same calls and bytes.

On each database: closed-loop phases of coordinator and echo in turn (what each can do), then open-loop arrivals at 70 % of
what the coordinator did (how long callers wait then), on PostgreSQL also with a second replica. With `--minutes`, a long
phase at 70 % on PostgreSQL that shows whether memory grows. Ends with a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.coordinator.fleet import Fleet, Seen
from benchmarks.coordinator.setting import Shape
from benchmarks.coordinator.stand import Stand
from benchmarks.coordinator.watch import Watch
from benchmarks.memory import slope
from benchmarks.tables import table
from demo.postgres import Postgres, find_binaries
from demo.processes import Processes

_LOAD = 0.7
_WARM_UPS = 8
_MIB = 2**20


class Benchmark:
    """The phases, and the rows that they leave."""

    def __init__(self, shape: Shape, clients: int, seconds: float, rounds: int) -> None:
        self._shape = shape
        self._clients = clients
        self._seconds = seconds
        self._rounds = rounds
        self.rows: list[dict[str, Any]] = []
        self.results: dict[str, Any] = {}

    def run(self, stand: Stand, database: str, echo: Fleet, echo_pids: dict[str, int], *, replica: bool) -> None:
        """All phases on one database."""
        stand.start()
        with Fleet(stand.endpoints, stand.run_id, self._shape, self._clients) as fleet:
            fleet.register()
            self._warm_up(fleet, stand)
            pairs = []
            for _ in range(self._rounds):
                stand.settle()
                bare = self._phase("echo", "closed loop", echo, echo_pids, None)
                ours = self._phase(database, "closed loop", fleet, stand.pids, stand)
                pairs.append((ours.rollouts_per_s, bare.rollouts_per_s))
            full = median(ours for ours, _ in pairs)
            stand.settle()
            at_load = self._phase(database, "open loop, 70 %", fleet, stand.pids, stand, rate=_LOAD * full)
        self.results[database] = {
            "rollouts_per_s": full,
            "echo_rollouts_per_s": median(bare for _, bare in pairs),
            "share_of_echo": median(ours / bare for ours, bare in pairs),
            "lease_p99_ms_at_70": at_load.lease_ms[1],
            "submit_p99_ms_at_70": at_load.submit_ms[1],
        }
        if replica:
            self._replica(stand, database, full)

    def _warm_up(self, fleet: Fleet, stand: Stand) -> None:
        """Until the first group is trained on: then all that a rollout goes through is under way."""
        for _ in range(_WARM_UPS):
            fleet.closed_loop(self._seconds)
            stand.check()
            if stand.counts()["consumed"]:
                return

    def _replica(self, stand: Stand, database: str, alone: float) -> None:
        stand.add_replica("coordinator 2")
        with Fleet(stand.endpoints, stand.run_id, self._shape, self._clients, first=10_000) as fleet:
            fleet.register()
            fleet.closed_loop(self._seconds / 2)
            stand.settle()
            both = self._phase(f"{database}, 2 replicas", "closed loop", fleet, stand.pids, stand)
        self.results[database]["with_second_replica"] = both.rollouts_per_s / alone

    def steady(self, stand: Stand, database: str, minutes: float, rate: float) -> None:
        """A long phase at a given rate: does memory grow?"""
        stand.start()
        with Fleet(stand.endpoints, stand.run_id, self._shape, self._clients) as fleet:
            fleet.register()
            with Watch(stand.pids) as watch:
                seen = fleet.open_loop(minutes * 60, rate)
            stand.check()
        memory = {}
        for name, samples in watch.memory.items():
            found = slope(samples)
            if found is not None:
                memory[name] = {
                    "median_mib": found.median / _MIB,
                    "mib_per_hour": found.per_hour / _MIB,
                    "uncertainty": found.uncertainty / _MIB,
                    "grows": found.leaks,
                }
        print(f"\n{minutes:g} minutes at {rate:.0f} rollouts/s: {seen}")
        print(table([{"process": name, **values} for name, values in memory.items()]), flush=True)
        self.results["steady"] = {"minutes": minutes, "rollouts_per_s": seen.rollouts_per_s, "memory": memory}

    def _phase(
        self, name: str, how: str, fleet: Fleet, pids: dict[str, int], stand: Stand | None, rate: float | None = None
    ) -> Seen:
        bytes_before, before = (stand.stored_bytes(), stand.counts()) if stand else (0, {})
        with Watch({**pids, **fleet.pids}) as watch:
            seen = fleet.closed_loop(self._seconds) if rate is None else fleet.open_loop(self._seconds, rate)
        row: dict[str, Any] = {
            "server": name,
            "load": how,
            "rollouts/s": seen.rollouts_per_s,
            "lease p50, p99 ms": seen.lease_ms,
            "submit p50, p99 ms": seen.submit_ms,
            "cores": "  ".join(f"{key} {value:.2f}" for key, value in _grouped(watch.cores).items()),
        }
        if stand is not None:
            stand.check()
            after = stand.counts()
            row["judged/s"] = (after["judged"] - before["judged"]) / self._seconds
            row["trained/s"] = (after["consumed"] - before["consumed"]) / self._seconds
            row["KiB each"] = (stand.stored_bytes() - bytes_before) / 1024 / max(1, seen.receipts)
        else:
            row |= {"judged/s": "", "trained/s": "", "KiB each": ""}
        row["failed"] = sum(seen.failures.values())
        self.rows.append(row)
        print(f"{row}{'  ' + str(seen.failures) if seen.failures else ''}", flush=True)
        return seen


def _grouped(cores: dict[str, float]) -> dict[str, float]:
    """The client processes as one."""
    found: dict[str, float] = {}
    for name, value in cores.items():
        key = "clients" if name.startswith("clients") else name
        found[key] = found.get(key, 0.0) + value
    return found


@contextlib.contextmanager
def _server() -> Iterator[Postgres]:
    binaries = find_binaries()
    if binaries is None:
        sys.exit("there is no PostgreSQL here: install it, or measure with --databases sqlite")
    server = Postgres(binaries, durable=True)
    try:
        yield server
    finally:
        server.stop()


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    shape = Shape(workers=arguments.workers, leases=arguments.leases, tokens=arguments.tokens)
    benchmark = Benchmark(shape, arguments.clients, arguments.seconds, arguments.rounds)
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-")))
        postgres = opened.enter_context(_server()) if "postgresql" in arguments.databases else None
        processes = opened.enter_context(Processes(folder / "logs"))
        sizes = ("--leases", str(shape.leases), "--tokens", str(shape.tokens))
        echo = processes.start("echo", ["benchmarks.coordinator.echo", *sizes])
        endpoint = echo.wait_ready(60)["grpc"]
        with Fleet([endpoint], "", shape, arguments.clients) as bare:
            for database in arguments.databases if arguments.rounds else ():
                server = postgres if database == "postgresql" else None
                with Stand(folder / database, shape, server) as stand:
                    benchmark.run(stand, database, bare, {"echo": echo.popen.pid}, replica=server is not None)
        if arguments.minutes:
            database = arguments.databases[-1]
            rate = arguments.rate or _LOAD * benchmark.results[database]["rollouts_per_s"]
            with Stand(folder / "steady", shape, postgres) as stand:
                benchmark.steady(stand, database, arguments.minutes, rate)
    print(f"\n{table(benchmark.rows)}\n" if benchmark.rows else "", flush=True)
    return {
        "benchmark": "coordinator",
        "machine": f"{platform.machine()} {_processor()}",
        "cores": os.cpu_count(),
        "workers": shape.workers,
        "leases_each": shape.leases,
        "tokens_each": shape.tokens,
        "seconds_per_phase": arguments.seconds,
        "rounds": arguments.rounds,
        **benchmark.results,
    }


def _processor() -> str:
    found = re.search(r"Model name:\s*(.+)", subprocess.run(["lscpu"], capture_output=True, text=True).stdout)
    return found.group(1) if found else "?"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.coordinator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--leases", type=int, default=8, help="asked for in one call")
    parser.add_argument("--tokens", type=int, default=200, help="of each completion")
    parser.add_argument("--clients", type=int, default=2, help="processes that the workers share")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase")
    parser.add_argument(
        "--rounds", type=int, default=3, help="pairs of phases, coordinator and echo in turn; 0: only the long phase"
    )
    parser.add_argument("--databases", nargs="+", choices=("sqlite", "postgresql"), default=("sqlite", "postgresql"))
    parser.add_argument("--minutes", type=float, default=0.0, help="of a long phase that watches memory; 0: none")
    parser.add_argument(
        "--rate", type=float, default=0.0, help="rollouts/s of the long phase; 70 %% of the capacity if 0"
    )
    # A benchmark that is told to stop takes its processes with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    arguments = parser.parse_args()
    if arguments.minutes and not arguments.rounds and not arguments.rate:
        parser.error("--minutes needs --rate where there are no --rounds to measure the capacity")
    print(json.dumps(run(arguments)))


if __name__ == "__main__":
    main()
