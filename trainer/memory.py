"""Memory that is free goes back to the system.

glibc keeps it, and tensors whose sizes change from batch to batch leave ever more of it between them: a trainer of SmolLM2-135M
on a CPU held 8.7 GB after nine steps, of which 3.1 were free.
"""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Return what the allocator holds and nobody uses; nothing happens where the C library has no `malloc_trim`."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
