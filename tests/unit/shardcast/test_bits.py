"""shardcast.bits: sets of indexes, compared with Python's own sets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardcast import bits

SETS = st.sets(st.integers(0, 300))


@given(SETS)
def test_a_set_comes_back_as_it_went_in(items: set[int]) -> None:
    assert list(bits.indexes(bits.of(items))) == sorted(items)


@given(SETS.filter(bool), st.integers(0, 400))
def test_the_first_member_from_a_place_on_goes_round(items: set[int], start: int) -> None:
    later = [item for item in items if item >= start]
    assert bits.from_on(bits.of(items), start) == min(later or items)


@given(st.integers(0, 200), st.integers(0, 200))
def test_a_span_is_a_range(start: int, stop: int) -> None:
    assert list(bits.indexes(bits.span(start, stop))) == list(range(start, stop))


def test_membership_and_the_least() -> None:
    both = bits.of([3, 70_000])
    assert bits.has(both, 3) and bits.has(both, 70_000) and not bits.has(both, 4)
    assert bits.lowest(both) == 3 and bits.full(3) == 7 and bits.of([]) == 0
