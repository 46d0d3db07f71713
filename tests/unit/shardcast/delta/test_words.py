"""shardcast.delta.words: any two runs of words, bit for bit; and what no encoder would write."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shardcast.delta import words as w
from shardcast.delta.errors import InvalidDelta
from shardcast.delta.frames import Parts, join_parts, open_frame
from tests.unit.shardcast.delta.versions import step, words

# +0, -0, the least numbers, 1.0 and its neighbours, the greatest, infinities, NaNs of both signs.
SPECIAL = [
    0x0000,
    0x8000,
    0x0001,
    0x8001,
    0x3F80,
    0x3F7F,
    0x3F81,
    0x7F7F,
    0xFF7F,
    0x7F80,
    0xFF80,
    0x7FC0,
    0xFFFF,
    0x7FFF,
]


def round_trip(base: np.ndarray, target: np.ndarray) -> int:
    """Encode and decode; the size of the frame."""
    found = w.encode_words(base, target)
    if found is None:
        assert np.array_equal(base, target)
        return 0
    head, parts = found
    frame, size = join_parts(parts)
    made = base.copy()
    reader = Parts(open_frame(frame, size))
    w.decode_words(head, reader, made)
    reader.end()
    assert np.array_equal(made, target)
    return len(frame)


word_arrays = arrays.arrays(np.uint16, st.integers(1, 400), elements=st.integers(0, 0xFFFF))


@settings(max_examples=60, deadline=None)
@given(base=word_arrays, seed=st.integers(0, 2**16), share=st.floats(0, 1), spread=st.sampled_from([1, 3, 40, 0xFFFF]))
def test_any_difference_round_trips(base: np.ndarray, seed: int, share: float, spread: int) -> None:
    random = np.random.default_rng(seed)
    changed = random.random(len(base)) < share
    target = np.where(changed, base + random.integers(0, spread + 1, len(base)).astype(np.uint16), base)
    round_trip(base, target)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), count=st.integers(1, 300))
def test_nan_infinity_and_minus_zero_are_words_like_any_other(data: st.DataObject, count: int) -> None:
    special = arrays.arrays(np.uint16, count, elements=st.sampled_from(SPECIAL))
    round_trip(data.draw(special), data.draw(special))


@pytest.mark.parametrize("share", [0.0, 0.00001, 0.001, 0.05, 0.5, 1.0])
def test_long_runs_round_trip_at_every_density(share: float) -> None:
    base = words(400_001)
    round_trip(base, step(base, share))


def test_a_long_gap_is_escaped() -> None:
    base = words(w.MAX_WORDS)
    target = base.copy()
    target[[0, 1, 2, 3, w.MAX_WORDS - 1]] ^= 0x4000
    assert round_trip(base, target) < 100


def test_words_that_move_where_units_are_small_cost_little() -> None:
    """As a training step does it: only words of small magnitude move, since a unit in the last place is small there."""
    base = words(1_000_000)
    small = (base & 0x7FFF) < 0x3A80  # below 2^-10
    target = np.where(small, base + 1, base).astype(np.uint16)
    changed = int(small.sum())
    assert changed > 10_000
    assert round_trip(base, target) * 8 < 1.6 * changed  # the sign, and next to nothing for the place


def test_words_that_change_seldom_have_no_flags() -> None:
    """Then nobody has to look at every word's exponent."""
    base = words(300_000)
    found = w.encode_words(base, step(base, 0.01))
    assert found is not None
    head, parts = found
    assert head.threshold == 0
    assert len(join_parts(parts[:3])[0]) * 8 < 8.5 * head.gap_count  # a gap has 8.1 bits of entropy


@pytest.mark.parametrize("share", [0.01, 0.3])
def test_the_base_may_be_read_in_stretches(share: float) -> None:
    base = words(1_200_000)
    target = step(base, share)
    found = w.encode_words(base, target)
    assert found is not None
    head, parts = found
    made = np.empty_like(base)
    asked = []

    def read(begin: int, out: np.ndarray) -> None:
        asked.append((begin, len(out)))
        out[:] = base[begin : begin + len(out)]

    w.decode_words(head, Parts(open_frame(*join_parts(parts))), made, read)
    assert np.array_equal(made, target)
    assert sum(count for _, count in asked) == len(base)
    assert (len(asked) > 1) == (head.threshold == 0)


def test_the_same_input_gives_the_same_bytes() -> None:
    base = words(100_000)
    first, second = (join_parts(w.encode_words(base, step(base, 0.02))[1]) for _ in range(2))  # type: ignore[index]
    assert first == second


def test_ordered_integers_are_in_the_order_of_the_numbers() -> None:
    every = np.arange(0x10000, dtype=np.uint32).astype(np.uint16)
    assert np.array_equal(w.unordered(w.ordered(every)), every)
    values = (every.astype(np.uint32) << 16).view(np.float32)
    finite = every[np.isfinite(values)]
    by_order = finite[np.argsort(w.ordered(finite))]
    sorted_values = (by_order.astype(np.uint32) << 16).view(np.float32)
    assert (np.diff(sorted_values.astype(np.float64)) >= 0).all()


@pytest.mark.parametrize(
    "head",
    [
        w.WordsHead(0x8001, 0, 0),
        w.WordsHead(0, 17, 0),
        w.WordsHead(0, 0, 101),
        w.WordsHead(0, 0, 100),  # more gaps than there are bytes
        w.WordsHead(0x8000, 0, 0),  # more flags than there are bytes
    ],
)
def test_impossible_parameters_are_refused(head: w.WordsHead) -> None:
    with pytest.raises(InvalidDelta):
        w.decode_words(head, Parts(np.zeros(3, np.uint8)), words(100))


@pytest.mark.parametrize("gaps", [[100], [50, 49], [255, 255, 255, 255, 255]])
def test_gaps_that_leave_the_block_are_refused(gaps: list[int]) -> None:
    data = bytes(gaps) + b"\xff" * 4 * gaps.count(255) + bytes(20)
    with pytest.raises(InvalidDelta, match="beyond its end"):
        w.decode_words(w.WordsHead(0, 0, len(gaps)), Parts(np.frombuffer(data, np.uint8)), words(100))


def test_a_word_can_not_be_named_twice() -> None:
    base = np.zeros(8, np.uint16)
    data = bytes([0xFF]) + bytes([0]) + bytes(10)  # all flagged, and the first also by a gap
    with pytest.raises(InvalidDelta, match="twice"):
        w.decode_words(w.WordsHead(0x80, 0, 1), Parts(np.frombuffer(data, np.uint8)), base)


@settings(max_examples=60, deadline=None)
@given(
    noise=st.binary(max_size=300),
    threshold=st.integers(0, 0x8000),
    shift=st.integers(0, 16),
    count=st.integers(0, 64),
)
def test_noise_is_refused_or_gives_some_words(noise: bytes, threshold: int, shift: int, count: int) -> None:
    made = words(64)
    try:
        w.decode_words(w.WordsHead(threshold, shift, count), Parts(np.frombuffer(noise, np.uint8)), made)
    except InvalidDelta:
        return
    assert made.dtype == np.uint16 and len(made) == 64
