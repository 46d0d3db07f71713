"""An append-only file of lines that several processes share: what is in it outlives everything, and is never rewritten."""

from __future__ import annotations

import os
from pathlib import Path


class AppendOnlyLines:
    """Every line is written at once with O_APPEND and synced. A line torn by a power cut is skipped by its reader."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_to = 0

    def append(self, line: str) -> None:
        """Add a line, durably."""
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, f"\n{line}\n".encode("ascii"))  # the first newline ends a torn line
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read_new(self) -> list[str]:
        """Whole lines that were added since the last call, by whomever."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_to)
                added = file.read()
        except FileNotFoundError:
            return []
        whole = added[: added.rfind(b"\n") + 1]
        self._read_to += len(whole)
        return [line for line in whole.decode("ascii", "replace").splitlines() if line]
