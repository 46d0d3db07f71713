"""Advisory locks between processes that share a data directory. The kernel frees them, also after `kill -9`."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

_POLL_S = 0.1


@contextlib.asynccontextmanager
async def held(path: Path) -> AsyncIterator[None]:
    """Wait until nobody holds the lock, another task of this process included, and hold it."""
    descriptor = _open(path)
    try:
        while not _try_lock(descriptor):  # noqa: ASYNC110 - another process holds it
            await asyncio.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def tried(path: Path) -> Iterator[bool]:
    """Hold the lock if nobody else does; says whether."""
    descriptor = _open(path)
    try:
        yield _try_lock(descriptor)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
