"""Runs of bfloat16 words as two planes: their exponents, which are coded, and their signs and mantissas, which are noise.

The weights of a trained model have exponents of about 2.6 bits of entropy where 8 are spent; sign and mantissa have 7.95 of
8. So half of the bytes shrink to a third and the other half travel as they are, which is also what makes this fast.

A word is turned left by one bit, so that its sign becomes the lowest: its upper byte is then the exponent. Every bit pattern
has one such pair: NaN, infinities and other 16-bit types are words like any other.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from shardcast.delta.frames import Bytes

_AT_ONCE = 64 * 1024  # words: they and what is made of them stay in the cache
# Exponents of neighbours are as good as independent: what compresses is the Huffman coding, and searching for matches, which
# are accidents, costs time and bytes. zstd can't be told to leave it; a table of 64 entries and long matches come near.
_PARAMETERS: Final = zstandard.ZstdCompressionParameters(
    compression_level=1, hash_log=6, min_match=7, write_checksum=False, write_content_size=True
)


def pack_planes(words: NDArray[np.uint16]) -> tuple[bytes, Bytes]:
    """A frame with the exponents, and the other halves, one byte each."""
    exponents, others = np.empty(len(words), np.uint8), np.empty(len(words), np.uint8)
    turned, sign = np.empty(_AT_ONCE, np.uint16), np.empty(_AT_ONCE, np.uint16)
    for begin in range(0, len(words), _AT_ONCE):
        part = words[begin : begin + _AT_ONCE]
        out, bit = turned[: len(part)], sign[: len(part)]
        np.left_shift(part, 1, out=out)
        np.right_shift(part, 15, out=bit)
        np.bitwise_or(out, bit, out=out)
        others[begin : begin + len(part)] = out  # the lower bytes
        np.right_shift(out, 8, out=exponents[begin : begin + len(part)], casting="unsafe")
    return zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress(exponents.data), others


def join_planes(exponents: Bytes, others: Bytes, words: NDArray[np.uint16]) -> None:
    """The inverse: fills `words`, of which there are as many as each plane has bytes."""
    spare = np.empty(_AT_ONCE, np.uint16)
    for begin in range(0, len(words), _AT_ONCE):
        part = words[begin : begin + _AT_ONCE]
        sign = spare[: len(part)]
        part[:] = exponents[begin : begin + len(part)]
        np.left_shift(part, 8, out=part)
        np.bitwise_or(part, others[begin : begin + len(part)], out=part)
        np.left_shift(part, 15, out=sign)
        np.right_shift(part, 1, out=part)
        np.bitwise_or(part, sign, out=part)
