"""One zstd frame per block of a delta, made of parts that are each coded by statistics of their own.

Between parts the compressor starts a new zstd block, so that each gets a Huffman table that fits it, without the cost
of a frame. Reading is hostile: the size is known before a byte is decompressed, and is the most that is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import zstandard
from numpy.typing import NDArray

from shardcast.delta.errors import InvalidDelta

Bytes = NDArray[np.uint8]

# Parts are noise with a skewed distribution: matches are rare, and what compresses is the Huffman coding.
_LEVEL = 1


def join_parts(parts: Iterable[Bytes]) -> tuple[bytes, int]:
    """The frame and the size of what is in it. The same parts give the same bytes."""
    filled = [part for part in parts if len(part)]
    size = sum(map(len, filled))
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False, write_content_size=True)
    frame = compressor.compressobj(size=size)
    pieces = []
    for part in filled:
        pieces.append(frame.compress(part.tobytes()))
        pieces.append(frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    pieces.append(frame.flush(zstandard.COMPRESSOBJ_FLUSH_FINISH))
    return b"".join(pieces), size


def open_frame(frame: bytes | memoryview, size: int) -> Bytes:
    """The `size` bytes in a frame. Raises InvalidDelta unless it holds exactly so many."""
    try:
        facts = zstandard.get_frame_parameters(frame)
        if facts.content_size != size or facts.dict_id:
            raise InvalidDelta(f"a frame of the delta declares {facts.content_size} bytes where {size} are due")
        # One call with the size known: zstd writes into a buffer of that size and needs no window.
        data = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise InvalidDelta(f"a frame of the delta is damaged: {error}") from None
    if len(data) != size:
        raise InvalidDelta(f"a frame of the delta has {len(data)} bytes where {size} are due")
    return np.frombuffer(data, np.uint8)


class Parts:
    """Hands out the bytes of an opened frame in order."""

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> Bytes:
        """The next `size` bytes. Raises InvalidDelta if there are fewer."""
        if size < 0 or self._at + size > len(self._data):
            raise InvalidDelta("a frame of the delta ends too early")
        part = self._data[self._at : self._at + size]
        self._at += size
        return part

    def end(self) -> None:
        """Raise InvalidDelta if bytes are left."""
        if self._at != len(self._data):
            raise InvalidDelta(f"a frame of the delta has {len(self._data) - self._at} bytes too many")
