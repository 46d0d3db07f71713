"""A worker's home is used by one process at a time: it holds the lock `worker.lock`, in which its process id stands.

The lock is the kernel's (flock), so it is gone when the process is, however that ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from protocol.errors import OurFault, UserError

_NAME = "worker.lock"
_POLL_S = 0.2


@contextlib.contextmanager
def held(home: Path) -> Iterator[None]:
    """Hold the home. Raises UserError if another process does, or it can't be written."""
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = (home / _NAME).open("a+")
    except OSError as error:
        raise UserError(
            f"cannot use {home}: {error.strerror}; choose another --home, or mend its permissions"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(_explain(home, _read(home))) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _explain(home: Path, process: int | None) -> str:
    who = "another process" if process is None else f"process {process}"
    return (
        f"{who} already works with the identity in {home}, and one identity is one worker: `worker leave` ends it, or give "
        "this one a home (and so an identity) of its own with --home"
    )


def holder(home: Path) -> int | None:
    """The process that holds the home, None if none does."""
    try:
        with (home / _NAME).open("r") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return _read(home)
    except OSError:
        return None
    return None


def leave(home: Path, patience_s: float) -> int:
    """Ask the worker of this home to finish what is begun and end, and wait for that; its process id.

    Raises UserError if none runs, OurFault if it does not end in time.
    """
    process = holder(home)
    if process is None:
        raise UserError(f"no worker runs with the home {home}: nothing to end (is it another --home?)")
    try:
        os.kill(process, signal.SIGTERM)
    except PermissionError:
        raise UserError(f"process {process} belongs to another user: run `worker leave` as that user") from None
    except ProcessLookupError:
        return process
    deadline = time.monotonic() + patience_s
    while holder(home) == process:
        if time.monotonic() > deadline:
            raise OurFault(
                f"process {process} has not ended within {patience_s:.0f} s: wait, or `kill {process}` once more to end it at "
                "once (what it has finished stays in the outbox)"
            )
        time.sleep(_POLL_S)
    return process


def _read(home: Path) -> int | None:
    try:
        return int((home / _NAME).read_text().strip())
    except (OSError, ValueError):
        return None
