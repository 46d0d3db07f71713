"""CPU time, memory and the database's size of what runs, by name. A process counts with its children."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import psutil

_SAMPLE_S = 1.0


def tree(pid: int) -> list[psutil.Process]:
    """The process and all below it that are alive."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_s(pid: int) -> float:
    """CPU seconds used so far, by what is alive and what it has waited for."""
    total = 0.0
    for number, process in enumerate(tree(pid)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
        if number == 0:
            total += times.children_user + times.children_system
    return total


def rss(pid: int) -> float:
    """Resident bytes that are the processes' own: pages that PostgreSQL's processes share count once."""
    total = 0
    for process in tree(pid):
        try:
            memory = process.memory_info()
        except psutil.NoSuchProcess:
            continue
        total += memory.rss - memory.shared
    return float(total)


def size(paths: list[Path]) -> int:
    """Bytes of files, and of folders with all that is in them."""
    found = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*"))]
    total = 0
    for file in found:
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:
            continue
    return total


class Watch:
    """Use as a context around a phase: `cores` afterwards holds how many cores each name used on average, `memory` its
    (seconds, bytes) by name."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.cores: dict[str, float] = {}
        self.memory: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def __enter__(self) -> Watch:
        self._begun = time.monotonic()
        self._before = {name: cpu_s(pid) for name, pid in self._pids.items()}
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        seconds = time.monotonic() - self._begun
        self.cores = {name: (cpu_s(pid) - self._before[name]) / seconds for name, pid in self._pids.items()}

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            for name, pid in self._pids.items():
                self.memory[name].append((time.monotonic() - self._begun, rss(pid)))
