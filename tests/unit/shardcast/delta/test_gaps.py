"""shardcast.delta.gaps: any ascending places come back, whatever the shift."""

from __future__ import annotations

import numpy as np
import pytest

from shardcast.delta import gaps as g
from shardcast.delta.errors import InvalidDelta
from shardcast.delta.frames import Parts


@pytest.mark.parametrize("shift", range(g.MAX_SHIFT + 1))
@pytest.mark.parametrize("count", [1, 7, 8, 9, 1001])
def test_places_come_back(shift: int, count: int) -> None:
    random = np.random.default_rng(count)
    gaps = random.integers(0, 300 << shift, count)  # some are escaped
    places = np.cumsum(gaps + 1) - 1
    data = Parts(np.concatenate(g.gap_parts(gaps, shift)))
    assert np.array_equal(g.read_places(data, count, shift, int(places[-1]) + 1), places)
    data.end()


def test_low_bits_are_packed_highest_first() -> None:
    """As docs/protocol.md has it."""
    low = g.gap_parts(np.array([0b101, 0b001, 0b110]), 3)[2]
    assert np.unpackbits(low).tolist() == [1, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]


def test_no_places_need_no_bytes() -> None:
    none = np.empty(0, np.int64)
    assert sum(map(len, g.gap_parts(none, g.shift_of(none)))) == 0
    assert len(g.read_places(Parts(np.empty(0, np.uint8)), 0, 0, 10)) == 0


@pytest.mark.parametrize("shift", [0, 5])
def test_cut_off_bytes_are_refused(shift: int) -> None:
    data = np.concatenate(g.gap_parts(np.arange(50), shift))[:-1]
    with pytest.raises(InvalidDelta, match="too early"):
        g.read_places(Parts(data), 50, shift, 10_000)


def test_the_shift_keeps_symbols_short() -> None:
    assert [g.shift_of(np.full(9, gap)) for gap in (3, 31, 32, 1000, 2**30)] == [0, 0, 1, 5, 16]
