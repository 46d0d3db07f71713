"""The demo's processes: started with their output in a file each, waited for by their ready line, stopped by their own id."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from protocol.errors import OurFault

_POLL_S = 0.05
_READY = re.compile(r"^ready (.*)$", re.MULTILINE)


@dataclass
class Process:
    """One role. `log` holds everything that it printed."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path
    _file: IO[bytes]

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    def wait_ready(self, timeout_s: float) -> dict[str, str]:
        """The fields of its ready line (`ready url=…`). Raises OurFault if it ends first or takes too long."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = _READY.search(self.log.read_text(errors="replace"))
            if found:
                return dict(field.split("=", 1) for field in found.group(1).split())
            if not self.running:
                raise OurFault(f"{self.name} ended with status {self.popen.returncode}: {self.last_words()}")
            time.sleep(_POLL_S)
        raise OurFault(f"{self.name} was not ready within {timeout_s:.0f} s: {self.last_words()}")

    def wait(self, timeout_s: float) -> int:
        """Its exit status. Raises OurFault if it does not end in time."""
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise OurFault(f"{self.name} did not end within {timeout_s:.0f} s: {self.last_words()}") from None

    def stop(self, grace_s: float = 20.0) -> int:
        """SIGTERM, then SIGKILL after `grace_s`; the exit status."""
        if self.running:
            self.popen.terminate()
            try:
                self.popen.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._kill_group()
                self.popen.wait()
        self._file.close()
        return self.popen.returncode

    def kill(self) -> None:
        """SIGKILL, as a power cut would."""
        self._kill_group()
        self.popen.wait()
        self._file.close()

    def _kill_group(self) -> None:
        """The process and its children: each role leads a process group of its own."""
        try:
            os.killpg(self.popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def last_words(self, lines: int = 3) -> str:
        """The end of its log, for an error message."""
        return " | ".join(self.log.read_text(errors="replace").strip().splitlines()[-lines:]) or "no output"


class Processes:
    """All processes of a run, in the order in which they were started. Use as a context: leaving it stops them."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._environment = {**os.environ, **(environment or {})}
        self.all: list[Process] = []

    def start(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None, nice: int = 0
    ) -> Process:
        """Start `python -m …` with these arguments; `nice` lowers its priority."""
        log = self._folder / f"{name}.log"
        file = log.open("ab")
        file.truncate(0)
        popen = subprocess.Popen(
            ["nice", "-n", str(nice), sys.executable, "-m", *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**self._environment, "PYTHONUNBUFFERED": "1", **(environment or {})},
            start_new_session=True,
        )
        process = Process(name, popen, log, file)
        self.all.append(process)
        return process

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop everything, the last started first; a second Ctrl-C does not leave processes behind."""
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for process in reversed(self.all):
                process.stop()
        finally:
            signal.signal(signal.SIGINT, before)
