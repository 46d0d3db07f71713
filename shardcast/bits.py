"""Sets of shard indexes as bits of one integer: set algebra over a hundred thousand shards in microseconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def full(count: int) -> int:
    """All of 0 to count - 1."""
    return (1 << count) - 1


def span(start: int, stop: int) -> int:
    """All of start to stop - 1.

    >>> list(indexes(span(2, 5)))
    [2, 3, 4]
    """
    return full(stop) & ~full(start)


def of(items: Iterable[int]) -> int:
    """The set of these indexes; built in one pass, however many they are."""
    found = sorted(set(items))
    if not found:
        return 0
    raw = bytearray(found[-1] // 8 + 1)
    for index in found:
        raw[index >> 3] |= 1 << (index & 7)
    return int.from_bytes(raw, "little")


def indexes(bits: int) -> Iterator[int]:
    """The members, ascending."""
    raw = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
    for at, byte in enumerate(raw):
        if byte:
            yield from (at * 8 + bit for bit in range(8) if byte >> bit & 1)


def has(bits: int, index: int) -> bool:
    """Whether the index is a member."""
    return bool(bits >> index & 1)


def lowest(bits: int) -> int:
    """The least member of a set that isn't empty."""
    return (bits & -bits).bit_length() - 1


def from_on(bits: int, start: int) -> int:
    """The first member at or after `start`, going round; the set isn't empty.

    >>> from_on(of([1, 4]), 2), from_on(of([1, 4]), 5)
    (4, 1)
    """
    above = bits >> start
    return start + lowest(above) if above else lowest(bits)
