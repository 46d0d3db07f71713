"""shardcast.delta.frames: frames hold exactly what was declared, and bombs are not opened."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import zstandard

from shardcast.delta.errors import InvalidDelta
from shardcast.delta.frames import Parts, join_parts, open_frame


def test_parts_come_back_in_order_and_empty_ones_cost_nothing() -> None:
    parts = [np.arange(200, dtype=np.uint8), np.empty(0, np.uint8), np.zeros(5000, np.uint8)]
    frame, size = join_parts(parts)
    assert size == 5200
    reader = Parts(open_frame(frame, size))
    for part in parts:
        assert np.array_equal(reader.take(len(part)), part)
    reader.end()
    assert join_parts(parts[:1] + parts[2:]) == (frame, size)


def test_each_part_is_coded_by_its_own_statistics() -> None:
    random = np.random.default_rng(0)
    parts = [random.integers(low, low + 4, 4000).astype(np.uint8) for low in range(0, 240, 16)]
    frame, _ = join_parts(parts)
    assert len(frame) * 8 < 2.5 * sum(map(len, parts))  # two bits a byte, and the tables


def test_a_bomb_is_not_opened() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(256 * 2**20))
    tracemalloc.start()
    for size in (1000, 2**20):
        with pytest.raises(InvalidDelta, match="declares"):
            open_frame(bomb, size)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_a_frame_without_its_size_is_not_opened() -> None:
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
    with pytest.raises(InvalidDelta):
        open_frame(unsized, 1000)


@pytest.mark.parametrize("damage", [lambda f: f[:-1], lambda f: f + b"x", lambda f: b"", lambda f: b"\0" * len(f)])
def test_damaged_frames_are_refused(damage: object) -> None:
    frame, size = join_parts([np.arange(200, dtype=np.uint8)])
    with pytest.raises(InvalidDelta):
        open_frame(damage(frame), size)  # type: ignore[operator]


def test_reading_too_much_or_too_little_is_noticed() -> None:
    reader = Parts(np.zeros(4, np.uint8))
    reader.take(3)
    with pytest.raises(InvalidDelta, match="too many"):
        reader.end()
    with pytest.raises(InvalidDelta, match="too early"):
        reader.take(2)
    with pytest.raises(InvalidDelta, match="too early"):
        reader.take(-1)
