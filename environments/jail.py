"""Runs a stranger's Python program: no network, nothing written, no other process, bounded CPU, memory, time and output.

A fence, not a prison: it stands on limits and namespaces of the kernel, below the scoring process's own (unprivileged user,
no secrets, no privileges to gain). Standard library only is offered, without site packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

from protocol.errors import EnvironmentFault

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_NO_NEW_PRIVILEGES = 38
_MOST_OUTPUT = 1 << 20
_START_S = 10.0  # beside the CPU limit, for a busy machine
_REFUSED = 97  # exit status of a child that could not give its network up


def isolated() -> bool:
    """Whether this process is in a network namespace that leads nowhere, as the scoring process of a root verifier is."""
    return [name for _, name in socket.if_nameindex()] == ["lo"]


@dataclass(frozen=True, slots=True)
class Jail:
    """Limits of each run. `network`: whether the namespace that we are in will do."""

    cpu_seconds: int
    memory_bytes: int
    network: bool = False

    def run(self, program: str, stdin: str) -> str | None:
        """What it printed; None if it failed, took too long, or printed too much.

        Raises EnvironmentFault if the system grants no network namespace: the fault is the machine's, not the program's.
        """
        # The program comes by an argument, so no file is needed; standard input is its own.
        command = [_interpreter(), "-I", "-S", "-c", program]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
                cwd="/",
                start_new_session=True,
                preexec_fn=self._enter,
            )
        except ValueError:  # a zero byte in the program
            return None
        except (OSError, subprocess.SubprocessError) as error:
            raise EnvironmentFault(f"the sandbox can't be started: {error}") from error
        try:
            output = _exchange(process, stdin.encode(), time.monotonic() + self.cpu_seconds + _START_S)
        finally:
            _end(process)
        if process.returncode == _REFUSED:
            raise EnvironmentFault(
                "this system grants no network namespace, so programs can't be run safely: run the verifier as root or allow "
                'user namespaces; or set network = "allowed" where the machine has nothing to reach'
            )
        return output.decode(errors="replace") if output is not None and process.returncode == 0 else None

    def _enter(self) -> None:
        """In the child, before it becomes Python again."""
        libc = ctypes.CDLL(None, use_errno=True)
        if not self.network and libc.unshare(_NEW_NETWORK) != 0 and libc.unshare(_NEW_USER | _NEW_NETWORK) != 0:
            os._exit(_REFUSED)
        libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        for limit, value in (
            (resource.RLIMIT_CPU, self.cpu_seconds),
            (resource.RLIMIT_AS, self.memory_bytes),
            (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_NOFILE, 32),
            (resource.RLIMIT_NPROC, 0),
            (resource.RLIMIT_CORE, 0),
        ):
            hard = resource.getrlimit(limit)[1]
            bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(limit, (bound, bound))


def _interpreter() -> str:
    """A Python that this process may run: our own, or the system's if ours lies where an unprivileged user can't reach.

    Raises EnvironmentFault if there is none.
    """
    for candidate in (sys.executable, shutil.which("python3", path=os.defpath)):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise EnvironmentFault(
        f"the scoring process may not run {sys.executable}: install Python where every user can read it, or a system python3"
    )


def _exchange(process: subprocess.Popen[bytes], data: bytes, deadline: float) -> bytes | None:
    """Give it its input and take its output, whichever it wants first; None past the deadline or the most output."""
    assert process.stdin is not None and process.stdout is not None
    reader, writer = process.stdout.fileno(), process.stdin.fileno()
    os.set_blocking(writer, False)
    output, rest, open_input = bytearray(), memoryview(data), True
    while (left := deadline - time.monotonic()) > 0 and len(output) <= _MOST_OUTPUT:
        readable, writable, _ = select.select([reader], [writer] if open_input else [], [], left)
        if writable:
            try:
                rest = rest[os.write(writer, rest[:65536]) :] if rest else rest
            except BrokenPipeError:
                rest = memoryview(b"")
            if not rest:
                process.stdin.close()
                open_input = False
        if readable:
            piece = os.read(reader, 65536)
            if not piece:
                return bytes(output) if _ended(process, left) else None
            output += piece
    return None


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether it ends by itself: it may have closed its output and go on."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of it, whatever happened."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
    process.wait()
