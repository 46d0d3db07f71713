"""An event loop whose clock is virtual: waiting takes no time, and what computes takes none either.

Whenever nothing can run, the clock jumps to the next timer. So a schedule of sleeps comes out exactly as planned and the
same every time, however slow or busy the machine is.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    """Never blocks; `waited` counts the seconds that it would have."""

    def __init__(self) -> None:
        super().__init__()
        self.waited = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0)
        if not found:
            assert timeout is not None, "everything waits for something that never comes"
            self.waited += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time` is what was waited for so far, in seconds from 0."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.waited


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run, on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
