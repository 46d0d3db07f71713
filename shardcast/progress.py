"""How far a fetch is, for the person at the terminal or for whoever reads the log."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from shardcast.travel import OnProgress, Progress, Way

_STEP = 10  # per cent between two plain lines


class PlainProgress:
    """One line per tenth of the whole, without control characters."""

    def __init__(self, label: str, write: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._label = label
        self._write = write
        self._clock = clock
        self._begin = clock()
        self._told = -1
        self._resumed: int | None = None  # bytes that were here already
        self._way = Way.FULL

    def __call__(self, progress: Progress) -> None:
        """Take note; writes a line if another tenth is done."""
        if self._resumed is None or progress.way is not self._way:
            self._way, self._told, self._resumed = progress.way, -1, progress.done
        step = 100 if not progress.total else progress.done * 100 // progress.total // _STEP * _STEP
        if step <= self._told:
            return
        self._told = step
        seconds = max(self._clock() - self._begin, 1e-6)
        speed = (progress.done - self._resumed) / seconds / 1e6
        self._write(
            f"{_labelled(self._label, progress)}: {step} % of {progress.total / 2**20:.1f} MiB, {speed:.1f} MB/s\n"
        )


@contextlib.contextmanager
def shown(label: str, total: int) -> Iterator[OnProgress]:
    """A bar on a terminal, plain lines elsewhere; on standard error."""
    if not sys.stderr.isatty():
        yield PlainProgress(label, sys.stderr.write)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)

        def show(progress: Progress) -> None:
            description = _labelled(label, progress)
            bar.update(task, description=description, completed=progress.done, total=progress.total)

        yield show


def _labelled(label: str, progress: Progress) -> str:
    return label if progress.way is Way.FULL else f"{label} ({progress.way})"
