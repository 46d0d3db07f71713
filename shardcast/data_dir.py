"""The folders of a data directory, and whose it is. `storage` says what lies in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from protocol.errors import UserError
from shardcast import locks

_FOLDERS = ("versions", "manifests", "deltas", "packed", "partial", "incoming", "locks", "trash")


@contextlib.contextmanager
def serve_alone(root: Path) -> Iterator[None]:
    """Only one server may use a data directory. Raises UserError if another does."""
    make_folders(root)
    with locks.tried(root / "locks" / "server") as alone:
        if not alone:
            raise UserError(f"another shardcast server uses {root}: give this one its own --data-dir")
        yield


def make_folders(root: Path) -> None:
    """Make what is missing. Raises UserError if that can't be."""
    try:
        for name in _FOLDERS:
            (root / name).mkdir(parents=True, exist_ok=True)
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise UserError(f"can't use {root} as a data directory: {error.strerror}: {error.filename}") from None
