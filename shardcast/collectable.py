"""Which versions a server or a client may remove: a pure decision, which `VersionStore.collect` executes."""

from __future__ import annotations

from collections.abc import Collection


def collectable(
    present: Collection[int], *, reading: Collection[int], required: Collection[int], keep_last: int
) -> list[int]:
    """Which versions may go: all but the last `keep_last` (at least the head), those being read, and those required.

    >>> collectable([0, 1, 2, 3, 4], reading=[1], required=[], keep_last=2)
    [0, 2]
    """
    newest = sorted(present)[-max(1, keep_last) :]
    kept = {*newest, *reading, *required}
    return sorted(set(present) - kept)
