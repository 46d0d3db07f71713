"""The difference of two runs of 16-bit floating-point words, bit for bit.

A step of training changes few words of a bfloat16 model, and most of those by one unit in the last place: an update is
about as large as the learning rate everywhere, while that unit grows with the word. So whether a word changes hangs on
its exponent above all, and both sides know the base's exponents. Words are therefore coded in two sets:

* *small* words, whose magnitude bits are below a threshold: one flag each (changed or not), sorted by exponent, so
  that flags of like probability lie together;
* all others, which hardly ever change: gaps between the changed ones.

To find the small words, both sides must look at every word's exponent, which takes as long as all else together. So
where flags save little, as after a usual step, no word counts as small (threshold 0), and all changed ones are gaps.

How much a word changes is a difference of ordered integers (sign-magnitude made monotone): its sign, whether it is
more than one unit, and if so how much more; again sorted by exponent.

Everything is arithmetic modulo 2^16 on the bit patterns: NaN, infinities and −0 are words like any other.
N words, K changed ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardcast.delta.errors import InvalidDelta
from shardcast.delta.frames import Bytes, Parts
from shardcast.delta.gaps import MAX_SHIFT, Places, gap_parts, read_places, shift_of

Words = NDArray[np.uint16]
ReadWords = Callable[[int, Words], None]

MAX_WORDS = 4 * 2**20  # of one block: bounds the memory of either side
_MAGNITUDE = np.uint16(0x7FFF)
_EXPONENT_SHIFT = 7
_CLASSES = 256
_FLAG_COST = 0.5  # bits by which the flag of one word must be worth the time, …
_SCAN_COST = 0.1  # … and bits for each word of a block that has flags: who applies it needs two
# nanoseconds more for each, in which a link of 50 Mbit/s brings as many bits. Over a slower one, flags would pay earlier.
_SAMPLE = 1024  # words: shares are estimated from runs of so many, …
_SAMPLED_ONE_IN = 32  # … one in so many, …
_SAMPLED_FROM = 65_536  # … or all of a shorter block
_SCAN = 64 * 1024  # words looked at in one go: they and their masks stay in the cache
_STRETCH = 512 * 1024  # words read and then changed: the second time they come from the cache
_MIN_PART = 2048  # bytes: a shorter part isn't worth statistics of its own


@dataclass(frozen=True, slots=True)
class WordsHead:
    """What must be known before the parts can be read. `threshold`: magnitude bits below it are small."""

    threshold: int
    gap_shift: int
    gap_count: int


def encode_words(base: Words, target: Words) -> tuple[WordsHead, list[Bytes]] | None:
    """The difference of two equally long runs of at most `MAX_WORDS`; None if there is none."""
    threshold = _threshold(base, target)
    if threshold:
        places, flagged, flag_parts = _flags(base, target, threshold)
        old, new = base.take(places), target.take(places)
    else:
        places, old, new = _changed(base, target)
        flagged, flag_parts = 0, []
    if not len(places):
        return None
    gaps = np.diff(places[flagged:], prepend=-1) - 1
    shift = shift_of(gaps)
    parts = [*flag_parts, *gap_parts(gaps, shift), *_difference_parts(old, new, flagged)]
    return WordsHead(threshold, shift, len(gaps)), parts


def decode_words(head: WordsHead, parts: Parts, words: Words, read: ReadWords | None = None) -> None:
    """Turn the base's `words` into the target's, in place. Raises InvalidDelta; then they are half-done.

    `read(begin, out)` puts the base's words from `begin` on into `out`; without it they are there already. Where that is
    possible they are read in stretches, each changed while it is in the cache.
    """
    if head.threshold > 0x8000 or head.gap_shift > MAX_SHIFT or head.gap_count > len(words):
        raise InvalidDelta("a block of the delta has impossible parameters")
    if not head.threshold:
        places = read_places(parts, head.gap_count, head.gap_shift, len(words))
        _move_ascending(words, places, _read_differences(parts, len(places)), read)
        return
    if read:
        read(0, words)
    small = SmallWords(words, head.threshold)
    flagged = small.places(np.flatnonzero(_bits(parts, small.count)))
    large = read_places(parts, head.gap_count, head.gap_shift, len(words))
    if ((words.take(large) & _MAGNITUDE) < head.threshold).any():
        raise InvalidDelta("a block of the delta names a word twice")
    order = np.concatenate([flagged, large])
    _move(words, order, _read_differences(parts, len(order)))


def _move_ascending(words: Words, places: Places, differences: Words, read: ReadWords | None) -> None:
    edges = np.searchsorted(places, np.arange(0, len(words) + _STRETCH, _STRETCH)).tolist()
    for number, (first, stop) in enumerate(itertools.pairwise(edges)):
        begin = number * _STRETCH
        part = words[begin : begin + _STRETCH]
        if read:
            read(begin, part)
        _move(part, places[first:stop] - begin, differences[first:stop])


def _move(words: Words, places: Places, differences: Words) -> None:
    words[places] = unordered(ordered(words.take(places)) + differences)


def ordered(words: Words) -> Words:
    """Integers in the order of the floating-point numbers that the words are: neighbours differ by one."""
    return words ^ ((words.view(np.int16) >> 15).view(np.uint16) | np.uint16(0x8000))


def unordered(integers: Words) -> Words:
    """The inverse of `ordered`."""
    return integers ^ (~(integers.view(np.int16) >> 15).view(np.uint16) | np.uint16(0x8000))


def _changed(base: Words, target: Words) -> tuple[Places, Words, Words]:
    """Where words differ, ascending; and what they are in the base and in the target."""
    mask = np.empty(_SCAN, np.bool_)
    places, before, after = [], [], []
    for begin in range(0, len(base), _SCAN):
        old, new = base[begin : begin + _SCAN], target[begin : begin + _SCAN]
        inner = np.flatnonzero(np.not_equal(old, new, out=mask[: len(old)]))
        before.append(old.take(inner))
        after.append(new.take(inner))
        inner += begin
        places.append(inner)
    return np.concatenate(places), np.concatenate(before), np.concatenate(after)


def _flags(base: Words, target: Words, threshold: int) -> tuple[Places, int, list[Bytes]]:
    """Where words changed: the small ones first, sorted by exponent, and how many these are; the flags of all small words."""
    places, exponents, flags = _scan(base, target, threshold)
    sort = _sorting(exponents)
    present = np.bincount(exponents, minlength=_CLASSES)[: threshold >> _EXPONENT_SHIFT]  # small words of each exponent
    count = int(present.sum())
    small = sort[:count]
    sorted_flags = flags.take(small)
    changed = places.take(small[sorted_flags])
    parts = _cut(np.packbits(sorted_flags), np.cumsum(present) // 8)
    return np.concatenate([changed, np.sort(places.take(sort[count:]))]), len(changed), parts


def _scan(base: Words, target: Words, threshold: int) -> tuple[Places, NDArray[np.uint8], NDArray[np.bool_]]:
    """Of the words that are small or changed, in order: places, exponents, and whether they changed."""
    differs, mask = np.empty(_SCAN, np.bool_), np.empty(_SCAN, np.bool_)
    places, exponents, flags = [], [], []
    for begin in range(0, len(base), _SCAN):
        part = base[begin : begin + _SCAN]
        changed, wanted = differs[: len(part)], mask[: len(part)]
        np.not_equal(part, target[begin : begin + _SCAN], out=changed)
        magnitude = _small_mask(part, threshold, wanted)
        inner = np.flatnonzero(np.logical_or(wanted, changed, out=wanted))
        exponents.append(_exponents_of(magnitude.take(inner)))
        flags.append(changed.take(inner))
        places.append(inner + begin)
    return np.concatenate(places), np.concatenate(exponents), np.concatenate(flags)


def _small_mask(part: Words, threshold: int, mask: NDArray[np.bool_]) -> Words:
    """Set `mask` where words are small; the magnitudes, doubled: that takes the sign bit away, and a sum is the fastest."""
    magnitude = np.add(part, part)
    if threshold:
        np.less_equal(magnitude, np.uint16(2 * threshold - 1), out=mask)
    else:
        mask[:] = False
    return magnitude


def _exponents_of(magnitude: Words) -> NDArray[np.uint8]:
    return (magnitude >> (_EXPONENT_SHIFT + 1)).astype(np.uint8)


def _sorting(exponents: NDArray[np.uint8]) -> Places:
    """How to sort by exponent and then by place."""
    return np.argsort(exponents, kind="stable")


class SmallWords:
    """The words whose magnitude bits are below a threshold, as if they were sorted by exponent and then by place.

    They are sorted in stretches that stay in the cache, and never as a whole: few of them are ever asked for.
    """

    def __init__(self, words: Words, threshold: int) -> None:
        mask = np.empty(_SCAN, np.bool_)
        places, counts = [np.empty(0, np.uint32)], []
        for begin in range(0, len(words) if threshold else 0, _SCAN):
            part = words[begin : begin + _SCAN]
            magnitude = _small_mask(part, threshold, mask[: len(part)])
            inner = np.flatnonzero(mask[: len(part)])
            exponents = _exponents_of(magnitude.take(inner))
            places.append((inner.take(_sorting(exponents)) + begin).astype(np.uint32))
            counts.append(np.bincount(exponents, minlength=_CLASSES))
        self._places = np.concatenate(places)  # stretch by stretch
        self.count = len(self._places)
        # Each stretch's words of one exponent are a run in both orders.
        sizes = np.array(counts, np.int64).reshape(-1, _CLASSES)
        here = np.cumsum(sizes.reshape(-1)) - sizes.reshape(-1)
        by_exponent = sizes.T.reshape(-1)
        filled = np.flatnonzero(by_exponent)
        self._starts = (np.cumsum(by_exponent) - by_exponent).take(filled)
        self._shift = here.reshape(sizes.shape).T.reshape(-1).take(filled) - self._starts

    def places(self, ranks: Places) -> Places:
        """Where the words with these ranks lie, which ascend."""
        begins = np.searchsorted(ranks, self._starts)  # of each run, among the ranks: there are fewer runs than ranks
        shift = self._shift.repeat(np.diff(begins, append=len(ranks)))
        return self._places.take(ranks + shift).astype(np.int64)


def _exponents(words: Words) -> NDArray[np.uint8]:
    return _exponents_of(np.add(words, words))


def _threshold(base: Words, target: Words) -> int:
    """Below which magnitude words are flagged: where a sample of the words says that it costs least.

    Flags of a class of which the share p changed cost its entropy, and each word a little for the time it takes; a gap
    between rare changes, log2(e / share) bits.
    """
    step = _SAMPLE if len(base) < _SAMPLED_FROM else _SAMPLE * _SAMPLED_ONE_IN
    old, new = (
        np.concatenate([words[begin : begin + _SAMPLE] for begin in range(0, len(words), step)])
        for words in (base, target)
    )
    present = np.bincount(_exponents(old), minlength=_CLASSES)
    hits = np.bincount(_exponents(old[old != new]), minlength=_CLASSES)
    flags = np.cumsum(present * (_entropy(hits / np.maximum(present, 1)) + _FLAG_COST))
    left = hits.sum() - np.cumsum(hits)
    gaps = left * np.log2(np.e * len(old) / np.maximum(left, 1))
    flags += _SCAN_COST * len(old)
    costs = np.concatenate([[hits.sum() * np.log2(np.e * len(old) / max(1, hits.sum()))], flags + gaps])
    return int(np.argmin(costs)) << _EXPONENT_SHIFT


def _entropy(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of a yes or no, in bits."""
    inner = np.clip(shares, 1e-9, 1 - 1e-9)
    entropy: NDArray[np.float64] = -(inner * np.log2(inner) + (1 - inner) * np.log2(1 - inner))
    return entropy


def _cut(data: Bytes, starts: Places) -> list[Bytes]:
    """Cut bytes at these places, but into no piece that is too short to have statistics of its own."""
    pieces: list[Bytes] = []
    begin = 0
    for start in (*starts.tolist(), len(data)):
        if start - begin >= _MIN_PART:
            pieces.append(data[begin:start])
            begin = start
    return [*pieces, data[begin:]]


def _difference_parts(base: Words, target: Words, small: int) -> list[Bytes]:
    """Signs; which differences exceed one unit; and by how much, low bytes and high bytes apart.

    The first `small` words are sorted by exponent: where it changes, statistics do.
    """
    difference = (ordered(target) - ordered(base)).view(np.int16)
    zigzag = ((difference << 1) ^ (difference >> 15)).view(np.uint16)
    excess = (zigzag - np.uint16(1)) >> 1
    big = excess > 0
    exponents = _exponents(base[:small])
    starts = np.append(np.flatnonzero(exponents[1:] != exponents[:-1]) + 1, small)[: len(base)]
    before = np.cumsum(big, dtype=np.int64)
    over = (excess[big] - np.uint16(1)).astype("<u2").view(np.uint8).reshape(-1, 2)
    return [
        np.packbits((zigzag & np.uint16(1)).astype(np.bool_)),
        *_cut(np.packbits(big), starts // 8),
        *_cut(np.ascontiguousarray(over[:, 0]), before[np.maximum(starts, 1) - 1]),
        np.ascontiguousarray(over[:, 1]),
    ]


def _read_differences(parts: Parts, count: int) -> Words:
    negative = _bits(parts, count)
    big = _bits(parts, count)
    over = int(big.sum())
    low, high = parts.take(over), parts.take(over)
    excess = np.zeros(count, np.uint16)
    excess[big] = (low | (high.astype(np.uint16) << 8)) + np.uint16(1)
    zigzag = (excess << 1) + np.uint16(2) - negative
    return (zigzag >> 1) ^ np.negative(zigzag & np.uint16(1), dtype=np.uint16)


def _bits(parts: Parts, count: int) -> NDArray[np.bool_]:
    return np.unpackbits(parts.take((count + 7) // 8), count=count).view(np.bool_)
