"""Runs a network of real processes with the tiny model, and restarts coordinator and relay every few minutes.

    python -m tests.soak --minutes 45 --restart-every 180 --engine vllm --out runs/soak

Prints each restart, then a table: versions, receipts, each process's memory and its slope. Exit status 0 if nothing leaks, no
process ended by itself, versions went on after every restart, every receipt is stored, and the outbox is empty at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from pathlib import Path

import psutil

from benchmarks.memory import Slope, slope
from tests.network import Network

_SAMPLE_S = 2.0
_RECOVER_S = 900.0  # a busy machine loads vLLM slowly
_GRACE_S = 60.0  # to hand in what is begun, and for vLLM to end
_RESTARTED = ("coordinator", "relay")
_ENGINES = {
    "reference": ("--engine", "reference"),
    "vllm": ("--enforce-eager", "--kv-cache-gib", "0.25", "--max-model-len", "128"),
}


class Soak:
    """`seed` decides what is restarted when, and whether by SIGTERM or SIGKILL."""

    def __init__(self, network: Network, seed: int, engine: str) -> None:
        self._network = network
        self._rng = random.Random(seed)
        self._engine = _ENGINES[engine]
        self._begun = time.monotonic()
        self.samples: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.restarts: list[str] = []
        self._due: list[str] = []

    def run(self, minutes: float, restart_every_s: float) -> None:
        """Raises AssertionError if a process ends by itself, or the run does not go on after a restart."""
        network = self._network
        network.start_servers()
        network.start("worker", *self._engine)
        network.wait("the run is under way", lambda: self.versions() >= 1, _RECOVER_S)
        end = time.monotonic() + minutes * 60
        while time.monotonic() < end:
            self._watch(min(restart_every_s, max(0.0, end - time.monotonic())))
            if time.monotonic() < end:
                self._restart(self._next())

    def _next(self) -> str:
        """Each as often as the others, in an order of chance."""
        if not self._due:
            self._due = self._rng.sample(_RESTARTED, len(_RESTARTED))
        return self._due.pop()

    def versions(self) -> int:
        return self._network.count("SELECT coalesce(max(version), -1) FROM policy_versions")

    def _watch(self, seconds: float) -> None:
        begun, last = time.monotonic(), 0.0

        def over() -> bool:
            nonlocal last
            now = time.monotonic()
            if now - last >= _SAMPLE_S:
                last = now
                self._sample(now)
            return now - begun >= seconds

        self._network.wait("the next restart", over, seconds + 60)

    def _sample(self, now: float) -> None:
        """Resident size of each process with its children."""
        for role, process in self._network.running.items():
            try:
                root = psutil.Process(process.popen.pid)
                size = sum(each.memory_info().rss for each in (root, *root.children(recursive=True)))
            except psutil.NoSuchProcess:
                continue
            self.samples[role].append((now - self._begun, float(size)))

    def _restart(self, role: str) -> None:
        network, hard = self._network, self._rng.random() < 0.5
        (network.kill if hard else network.stop)(role)
        network.start(role)
        goal, begun = self.versions() + 2, time.monotonic()
        network.wait(f"two versions more after {role} was restarted", lambda: self.versions() >= goal, _RECOVER_S)
        how, seconds = "SIGKILL" if hard else "SIGTERM", time.monotonic() - begun
        line = f"{role} restarted by {how}: two versions more after {seconds:.0f} s"
        self.restarts.append(line)
        print(line, flush=True)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--minutes", type=float, default=45)
    parser.add_argument("--restart-every", type=float, default=180, metavar="SECONDS")
    parser.add_argument("--engine", choices=sorted(_ENGINES), default="vllm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/soak"))
    options = parser.parse_args()
    with Network(options.out / time.strftime("%Y%m%d-%H%M%S"), versions=1_000_000) as network:
        soak = Soak(network, options.seed, options.engine)
        soak.run(options.minutes, options.restart_every)
        return report(network, soak, options.out)


def report(network: Network, soak: Soak, out: Path) -> int:
    """Stop the worker, look at what is left, print and write it all."""
    slopes = {role: slope(found) for role, found in soak.samples.items() if role not in _RESTARTED}
    ended = network.stop("worker", _GRACE_S)
    outbox = len(list((network.folder / "worker").rglob("*.rollout")))
    network.check_invariants()
    facts = {
        "versions": soak.versions(),
        "rollouts": network.count("SELECT count(*) FROM rollouts"),
        "live_leases": network.count("SELECT count(*) FROM leases WHERE state = 'live'"),
        "outbox": outbox,
        "worker_exit": ended,
        "restarts": soak.restarts,
        "memory": {role: _words(found) for role, found in slopes.items()},
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1))
    leaks = [role for role, found in slopes.items() if found is not None and found.leaks]
    held = not leaks and outbox == 0 and ended == 0 and facts["live_leases"] == 0
    print("held" if held else f"did not hold (leaks: {', '.join(leaks) or 'none'})")
    return 0 if held else 1


def _words(found: Slope | None) -> str:
    if found is None:
        return "too few samples"
    mib = 2**20
    return f"{found.median / mib:.0f} MiB, {found.per_hour / mib:+.1f} ± {found.uncertainty / mib:.1f} MiB per hour"


if __name__ == "__main__":
    sys.exit(main())
