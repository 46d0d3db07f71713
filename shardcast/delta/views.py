"""A version's bytes, wherever they are: anything that can fill a buffer with a range of one of its files."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np

from protocol.manifest import ManifestFile
from shardcast.delta.errors import BaseUnreadable
from shardcast.delta.frames import Bytes


class View(Protocol):
    """`files` are the manifest's, and ranges lie within them. `read` may be called from several threads."""

    @property
    def files(self) -> Sequence[ManifestFile]: ...

    def read(self, file: int, offset: int, out: Bytes) -> None:
        """Fill `out` with the bytes from `offset` on. Raises BaseUnreadable, or InvalidDelta where a delta is read."""
        ...


class FolderView:
    """The files of a folder. They are opened at once: what is removed afterwards stays readable."""

    def __init__(self, folder: Path, files: Sequence[ManifestFile]) -> None:
        self.files = files
        self._descriptors: list[int] = []
        try:
            for file in files:
                self._descriptors.append(os.open(folder / file.path, os.O_RDONLY | os.O_NOFOLLOW))
        except OSError as error:
            self.close()
            raise BaseUnreadable(f"{folder} can't be read: {error.strerror}; it is fetched again") from error

    def read(self, file: int, offset: int, out: Bytes) -> None:
        view = out.data
        while view:
            try:
                count = os.preadv(self._descriptors[file], [view], offset)
            except OSError as error:
                raise BaseUnreadable(f"{self.files[file].path} can't be read: {error.strerror}") from error
            if not count:
                raise BaseUnreadable(f"{self.files[file].path} is shorter than its {self.files[file].size} bytes")
            view = view[count:]
            offset += count

    def mapped(self, file: int, offset: int, size: int) -> Bytes:
        """A range of a file as it lies in memory, read-only; unmapped when nobody refers to it any more.

        Several times faster than `read` where bytes are only looked at. The file must not be cut off meanwhile, which
        would end the process: for files that are this process's own. Raises BaseUnreadable.
        """
        skipped = offset % mmap.ALLOCATIONGRANULARITY
        try:
            window = mmap.mmap(
                self._descriptors[file],
                skipped + size,
                flags=mmap.MAP_SHARED,
                prot=mmap.PROT_READ,
                offset=offset - skipped,
            )
        except (OSError, ValueError) as error:
            raise BaseUnreadable(f"{self.files[file].path} can't be read: {error}") from error
        return np.frombuffer(window, np.uint8, size, skipped)

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __enter__(self) -> FolderView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
