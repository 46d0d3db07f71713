from __future__ import annotations

import psutil

from trainer.memory import give_back

_BLOCKS, _SIZE = 2000, 64 * 1024  # each too small for a mapping of its own


def test_what_is_free_between_what_is_used_goes_back() -> None:
    own = psutil.Process()
    blocks: list[bytearray | None] = [bytearray(b"x" * _SIZE) for _ in range(_BLOCKS)]
    for number in range(0, _BLOCKS, 2):
        blocks[number] = None
    before = own.memory_info().rss
    give_back()
    freed = before - own.memory_info().rss
    assert freed > _BLOCKS // 2 * _SIZE / 2
    assert sum(block is not None for block in blocks) == _BLOCKS // 2
