"""A blob on its way in: a delta, or a version packed. Whoever makes shards out of it need not wait for all of it."""

from __future__ import annotations

import bisect
import shutil
from collections.abc import Sequence
from pathlib import Path

from shardcast.delta.decode import BlobFile
from shardcast.delta.errors import NotHereYetError
from shardcast.download import Download
from shardcast.filling import OnShard
from shardcast.partial import PartialVersion, journal_path


class BlobIn:
    """`partial` has one file. `watch` adds a callback for each verified shard; all are called in the event loop."""

    def __init__(self, partial: PartialVersion) -> None:
        self.partial = partial
        self.download: Download | None = None  # while servers send it
        self._watching: list[OnShard] = []
        self._starts = [shard.offset for shard in partial.manifest.shards]
        self._demanded: list[int] = []

    @property
    def path(self) -> Path:
        """Where it lies while it comes."""
        return self.partial.folder / self.partial.manifest.files[0].path

    @property
    def whole(self) -> bool:
        """Whether every shard of it is here."""
        return len(self.partial.have) == len(self._starts)

    @property
    def missing_bytes(self) -> int:
        return self.partial.manifest.total_bytes - self.partial.done_bytes

    @property
    def coming(self) -> Sequence[int]:
        """The shards that are being sent now."""
        return [] if self.download is None else self.download.coming

    def demand(self, index: int) -> None:
        """Somebody waits for this shard: fetch it before the others."""
        if self.download is not None:
            self.download.demand(index)
        else:
            self._demanded.append(index)

    def begin(self, download: Download) -> None:
        """Servers are about to send it."""
        self.download = download
        for index in self._demanded:
            download.demand(index)

    def watch(self, on_shard: OnShard) -> None:
        self._watching.append(on_shard)

    def on_shard(self, index: int) -> None:
        """A shard was verified."""
        for watching in self._watching:
            watching(index)

    def shards_at(self, offset: int, count: int) -> range:
        """The shards that hold these bytes."""
        first = bisect.bisect_right(self._starts, offset) - 1
        return range(first, bisect.bisect_left(self._starts, offset + count, lo=first))

    def open(self) -> BlobFile:
        """For reading what is here of it. Reading the rest raises NotHereYetError."""
        return BlobFile(self.path, self._check)

    def discard(self) -> None:
        """Remove what came. Blocking."""
        shutil.rmtree(self.partial.folder, ignore_errors=True)
        journal_path(self.partial.folder).unlink(missing_ok=True)

    def _check(self, offset: int, count: int) -> None:
        if not all(index in self.partial.have for index in self.shards_at(offset, count)):
            raise NotHereYetError(f"bytes {offset} to {offset + count} of the blob are on their way")
