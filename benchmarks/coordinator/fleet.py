"""Client processes from the outside: start them, tell them what to do all at once, put together what they saw."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.coordinator.setting import Shape

_WARM_S = 1.0


@dataclass(frozen=True, slots=True)
class Seen:
    """One phase over all client processes. Latencies in milliseconds, as (median, 99th percentile)."""

    rollouts_per_s: float
    lease_ms: tuple[float, float]
    submit_ms: tuple[float, float]
    receipts: int
    leases: int
    empty: int
    failures: dict[str, int]


class Fleet:
    """So many workers in `processes` processes. `run_id`: "" where they talk to an echo. Use as a context."""

    def __init__(self, endpoints: Sequence[str], run_id: str, shape: Shape, processes: int, first: int = 0) -> None:
        share = -(-shape.workers // processes)
        self._processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "benchmarks.coordinator.clients"),
                    *(word for endpoint in endpoints for word in ("--endpoint", endpoint)),
                    *("--run", run_id, "--first", str(first + number * share)),
                    *("--count", str(min(share, shape.workers - number * share))),
                    *("--leases", str(shape.leases), "--tokens", str(shape.tokens)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(processes)
        ]
        for process in self._processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n", "a client did not start"

    @property
    def pids(self) -> dict[str, int]:
        return {f"clients {number}": process.pid for number, process in enumerate(self._processes)}

    def register(self) -> None:
        self._tell({"do": "register"})

    def closed_loop(self, seconds: float) -> Seen:
        return _together(self._tell({"do": "closed", "seconds": seconds}), seconds)

    def open_loop(self, seconds: float, rate: float) -> Seen:
        """`rate`: rollouts per second of all processes together."""
        return _together(self._tell({"do": "open", "seconds": seconds, "rate": rate / len(self._processes)}), seconds)

    def _tell(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            answers.append(json.loads(process.stdout.readline()))
        return answers

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def _together(answers: Sequence[dict[str, Any]], seconds: float) -> Seen:
    failures: Counter[str] = Counter()
    for answer in answers:
        failures.update(answer["failures"])
    begun = min((answer["begun"] for answer in answers if answer["receipts"]), default=0.0)
    done = [each for answer in answers for each in answer["done"]]
    steady = sum(begun + _WARM_S <= each < begun + seconds for each in done)
    receipts = sum(answer["receipts"] for answer in answers)
    return Seen(
        rollouts_per_s=steady / (seconds - _WARM_S) if done else receipts / seconds,
        lease_ms=_percentiles([each for answer in answers for each in answer["lease_s"]]),
        submit_ms=_percentiles([each for answer in answers for each in answer["submit_s"]]),
        receipts=receipts,
        leases=sum(answer["leases"] for answer in answers),
        empty=sum(answer["empty"] for answer in answers),
        failures=dict(failures),
    )


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    if not seconds:
        return float("nan"), float("nan")
    median, tail = np.quantile(np.asarray(seconds) * 1000, [0.5, 0.99])
    return float(median), float(tail)
