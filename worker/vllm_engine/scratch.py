"""A temporary folder for each engine: its log, and vLLM's sockets. What a killed process has left the next engine clears.

A folder holds a file that its process has locked (flock), so a lock that is free says that the process is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "rollswarm-engine-"
_LOCK = "lock"
_SOCKET_PATH_BYTES = 107  # the longest path that a unix socket may have
_UUID_BYTES = 36  # what vLLM names its sockets by


class Scratch:
    """Made when an engine starts; `remove` when it has stopped. Blocking."""

    def __init__(self) -> None:
        _clear()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Locked before it has the name that others look for.
        unseen = self.path / "unseen"
        self._lock = unseen.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unseen.rename(self.path / _LOCK)

    @property
    def holds_sockets(self) -> bool:
        """Whether the path of a socket in it is short enough."""
        return len(os.fsencode(self.path)) + 1 + _UUID_BYTES <= _SOCKET_PATH_BYTES

    def remove(self) -> None:
        self._lock.close()
        shutil.rmtree(self.path, ignore_errors=True)


def _clear() -> None:
    """Remove the folders of this user's processes that are gone."""
    for folder in Path(tempfile.gettempdir()).glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
