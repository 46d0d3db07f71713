"""Ascending places in a block, as the gaps between them: a symbol of eight bits each, and low bits, which are noise."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardcast.delta.errors import InvalidDelta
from shardcast.delta.frames import Bytes, Parts

Places = NDArray[np.int64]

MAX_SHIFT = 16
_ESCAPE = 255
_TYPICAL_SYMBOL = 32  # gaps are scaled so that their mean is below it, and escapes are rare


def shift_of(gaps: Places) -> int:
    """How many low bits of each gap are left to themselves."""
    mean = int(gaps.mean()) if len(gaps) else 0
    return min(MAX_SHIFT, max(0, mean.bit_length() - _TYPICAL_SYMBOL.bit_length() + 1))


def gap_parts(gaps: Places, shift: int) -> list[Bytes]:
    """High bits as a byte each, those that don't fit as uint32, and the low bits, which are noise."""
    high = gaps >> shift
    symbols = np.minimum(high, _ESCAPE).astype(np.uint8)
    escaped = high[high >= _ESCAPE].astype("<u4").view(np.uint8)
    return [symbols, escaped, _pack_low(gaps, shift)]


def _pack_low(gaps: Places, shift: int) -> Bytes:
    if not shift:
        return np.empty(0, np.uint8)
    rows = -(-len(gaps) // 8)
    low = np.zeros(8 * rows, np.uint32)
    low[: len(gaps)] = gaps & ((1 << shift) - 1)
    columns = np.zeros((shift + 2, rows), np.uint8)
    for number, (byte, lowest) in zip(low.reshape(-1, 8).T, _lanes(shift), strict=True):
        window = number << lowest
        for part in range(3):
            columns[byte + part] |= (window >> (16 - 8 * part)).astype(np.uint8)
    return np.ascontiguousarray(columns[:shift].T).reshape(-1)[: (len(gaps) * shift + 7) // 8]


def _read_low(data: Bytes, count: int, shift: int) -> NDArray[np.uint32]:
    """The inverse of `_pack_low`."""
    rows = -(-count // 8)
    padded = np.zeros(rows * shift, np.uint8)
    padded[: len(data)] = data
    columns = np.zeros((shift + 2, rows), np.uint32)
    columns[:shift] = padded.reshape(-1, shift).T
    numbers = np.empty((rows, 8), np.uint32)
    for lane, (byte, lowest) in enumerate(_lanes(shift)):
        window = (columns[byte] << 16) | (columns[byte + 1] << 8) | columns[byte + 2]
        numbers[:, lane] = (window >> lowest) & ((1 << shift) - 1)
    return numbers.reshape(-1)[:count]


def _lanes(shift: int) -> list[tuple[int, int]]:
    """Eight numbers of `shift` bits, highest first, fill `shift` bytes. For each: the first of three bytes that hold it,
    and its lowest bit in them.
    """
    starts = (lane * shift for lane in range(8))
    return [(start // 8, 24 - start % 8 - shift) for start in starts]


def read_places(parts: Parts, gap_count: int, shift: int, count: int) -> Places:
    """Ascending places below `count`. Raises InvalidDelta."""
    symbols = parts.take(gap_count)
    gaps = symbols.astype(np.int64)
    escapes = symbols == _ESCAPE
    gaps[escapes] = parts.take(4 * int(escapes.sum())).view("<u4")
    gaps <<= shift
    if shift:
        size = (gap_count * shift + 7) // 8
        gaps += _read_low(parts.take(size), gap_count, shift)
    if len(gaps) and int(gaps.max()) >= count:  # also keeps the sum far below 2^63
        raise InvalidDelta("a block of the delta reaches beyond its end")
    places: Places = np.cumsum(gaps + 1) - 1
    if len(places) and int(places[-1]) >= count:
        raise InvalidDelta("a block of the delta reaches beyond its end")
    return places
