"""How often a process that serves for long looks for garbage in circles."""

from __future__ import annotations

import gc

_YOUNG = 10_000  # objects; Python's own bound is met by a single batch of submissions


def settle() -> None:
    """Call once what the process is made of is loaded: it stays as long as the process, and is never looked through again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG)
