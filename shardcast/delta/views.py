"""A version's bytes, wherever they are: anything that can fill a buffer with a range of one of its files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

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

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __enter__(self) -> FolderView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
