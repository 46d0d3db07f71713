"""The layout of a blob that makes a version, and its reading, which believes nothing.

    magic "RSDELTA" and the format version (8 bytes)
    u32 span; u32 count of sections; then a u32 size for each
    the sections in order. Each makes consecutive shards of one file of the target: as many as have `span` bytes together,
    at least one. It is a sequence of blocks that tile them

A block is a head of 16 bytes (u8 kind, u8 zero, u16 file, u32 bytes that it makes, u64 offset), then what its kind
needs; all numbers little-endian. `file` and `offset` say where in the base it begins (0 where it needs no base):

    0 COPY    the base's bytes
    1 WORDS   the base's 16-bit words with a difference (`words`): u16 threshold, u8 gap shift, u8 zero, u32 gap count,
              u32 size of the frame, u32 size of what is in it, the frame
    2 XOR     the base's bytes xor those in a frame: u32 its size, the frame
    3 RAW     the bytes in a frame: u32 its size, the frame
    4 TWIN    the bytes that the *target* has at file and offset, before this block, made by blocks of other kinds
    5 PLANES  16-bit words without a base: u32 size of a frame, the frame, which has the exponents (`planes`), and a byte more
              for each word, the rest of it

A packed version is such a blob over a base without files.

So every section can be read and applied by itself, in any order, with the memory of its shards and one block. Shards are
small so that they can be passed on soon; sections are larger, since statistics of more words cost less.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from protocol.manifest import Manifest, ManifestFile, Shard
from shardcast.delta.errors import InvalidDelta
from shardcast.delta.words import MAX_WORDS, WordsHead

MAGIC = b"RSDELTA\x01"
MAX_BLOCK_BYTES = 2 * MAX_WORDS
MAX_BLOCKS = 4096  # of one section
MAX_SPAN = 256 * 2**20
SPAN = MAX_BLOCK_BYTES
HEAD = struct.Struct("<8sII")
BLOCK = struct.Struct("<BBHIQ")
WORDS = struct.Struct("<HBBIII")
FRAME = struct.Struct("<I")

ReadBlob = Callable[[int, int], bytes]


class Kind(IntEnum):
    """How a block makes its bytes."""

    COPY = 0
    WORDS = 1
    XOR = 2
    RAW = 3
    TWIN = 4
    PLANES = 5


_FREE = frozenset({Kind.RAW, Kind.PLANES})  # kinds that need no base


@dataclass(frozen=True, slots=True)
class Block:
    """Makes bytes [at, at + size) of a target file. `frame` and `content_size`: what is compressed in it.

    `plain`: what PLANES has beside it.
    """

    kind: Kind
    at: int
    size: int
    file: int
    offset: int
    head: WordsHead | None = None
    frame: bytes | memoryview = b""
    content_size: int = 0
    plain: bytes | memoryview = b""

    def pieces(self) -> list[bytes | memoryview]:
        """As the blob has it, one after the other: nothing is copied."""
        start = BLOCK.pack(self.kind, 0, self.file, self.size, self.offset)
        if self.kind is Kind.WORDS:
            assert self.head is not None
            head = (self.head.threshold, self.head.gap_shift, 0, self.head.gap_count)
            return [start + WORDS.pack(*head, len(self.frame), self.content_size), self.frame]
        if self.kind in (Kind.XOR, Kind.RAW, Kind.PLANES):
            return [start + FRAME.pack(len(self.frame)), self.frame, self.plain]
        return [start]


@dataclass(frozen=True, slots=True)
class Section:
    """Makes bytes [offset, offset + size) of a target file, which are the shards [first, stop)."""

    file: int
    offset: int
    size: int
    first: int
    stop: int


def sections_of(shards: Sequence[Shard], span: int) -> list[Section]:
    """How a version's shards are put together, in order."""
    sections: list[Section] = []
    for index, shard in enumerate(shards):
        last = sections[-1] if sections else None
        if last is not None and last.file == shard.file and last.size + shard.size <= span:
            sections[-1] = Section(last.file, last.offset, last.size + shard.size, last.first, index + 1)
        else:
            sections.append(Section(shard.file, shard.offset, shard.size, index, index + 1))
    return sections


def table_bytes(shards: int) -> int:
    """The most bytes that head and table of a blob may have whose version has so many shards."""
    return HEAD.size + 4 * shards


class Blob:
    """A blob that fits `target` by its table of sections. `read(offset, count)` gives bytes of it."""

    def __init__(self, read: ReadBlob, size: int, target: Manifest, base: Sequence[ManifestFile]) -> None:
        """Raises InvalidDelta."""
        self._read = read
        self._target = target
        self._base = base
        if size < HEAD.size:
            raise InvalidDelta(f"the delta has {size} bytes, its head alone would need {HEAD.size}")
        magic, span, count = HEAD.unpack(read(0, HEAD.size))
        if magic != MAGIC:
            raise InvalidDelta(f"the delta begins with {magic!r}, this program reads {MAGIC!r}: update it")
        if not 1 <= span <= MAX_SPAN:
            raise InvalidDelta(f"the delta's sections would span {span} bytes")
        self.sections = sections_of(target.shards, span)
        if count != len(self.sections):
            raise InvalidDelta(f"the delta has {count} sections, its version needs {len(self.sections)}")
        start = HEAD.size + 4 * count
        if size < start:
            raise InvalidDelta(f"the delta has {size} bytes, its table alone would need {start}")
        self.places: list[tuple[int, int]] = []  # of each section: offset and size
        for section, length in zip(self.sections, struct.unpack(f"<{count}I", read(HEAD.size, 4 * count)), strict=True):
            if length > 2 * section.size + BLOCK.size * MAX_BLOCKS:
                raise InvalidDelta(f"a section of the delta has {length} bytes, too many for what it makes")
            self.places.append((start, length))
            start += length
        if start != size:
            raise InvalidDelta(f"the delta has {size} bytes, its sections need {start}")

    def blocks(self, index: int) -> list[Block]:
        """The blocks of a section, checked against the bounds of base and target. Raises InvalidDelta."""
        data = memoryview(self._read(*self.places[index]))
        section = self.sections[index]
        blocks: list[Block] = []
        at, end = section.offset, section.offset + section.size
        while len(data):
            block, used = _parse(data, at)
            if len(blocks) == MAX_BLOCKS or block.at + block.size > end:
                raise InvalidDelta(f"section {index} of the delta makes too much")
            self._check(block, section.file)
            blocks.append(block)
            data = data[used:]
            at += block.size
        if at != end:
            raise InvalidDelta(f"section {index} of the delta makes {at - section.offset} of {section.size} bytes")
        return blocks

    def _check(self, block: Block, file: int) -> None:
        if block.kind not in (Kind.COPY, Kind.TWIN) and block.size > MAX_BLOCK_BYTES:
            raise InvalidDelta(f"a block of the delta makes {block.size} bytes at once")
        odd = block.kind in (Kind.WORDS, Kind.PLANES) and block.size % 2
        if odd or (block.kind is Kind.WORDS and block.content_size > 8 * block.size + 64):
            raise InvalidDelta("a block of the delta has an impossible size")
        if block.kind is Kind.TWIN:
            if block.file > file or (block.file == file and block.offset + block.size > block.at):
                raise InvalidDelta("a block of the delta copies what comes after it")
            files: Sequence[ManifestFile] = self._target.files
        else:
            files = self._base
        if block.kind in _FREE:
            if block.file or block.offset:
                raise InvalidDelta("a block of the delta names a base that it doesn't need")
        elif block.file >= len(files) or block.offset + block.size > files[block.file].size:
            raise InvalidDelta("a block of the delta reads beyond a file")


def _parse(data: memoryview, at: int) -> tuple[Block, int]:
    try:
        number, zero, file, size, offset = BLOCK.unpack_from(data)
        kind = Kind(number)
        if zero or not size:
            raise ValueError
        used = BLOCK.size
        if kind is Kind.WORDS:
            threshold, shift, zero, gaps, length, content = WORDS.unpack_from(data, used)
            if zero:
                raise ValueError
            frame, used = _frame(data, used + WORDS.size, length)
            return Block(kind, at, size, file, offset, WordsHead(threshold, shift, gaps), frame, content), used
        if kind in (Kind.XOR, Kind.RAW):
            (length,) = FRAME.unpack_from(data, used)
            frame, used = _frame(data, used + FRAME.size, length)
            return Block(kind, at, size, file, offset, None, frame, size), used
        if kind is Kind.PLANES:
            (length,) = FRAME.unpack_from(data, used)
            frame, used = _frame(data, used + FRAME.size, length)
            plain, used = _frame(data, used, size // 2)
            return Block(kind, at, size, file, offset, None, frame, size // 2, plain), used
    except (ValueError, struct.error):
        raise InvalidDelta("a block of the delta has a head that means nothing") from None
    return Block(kind, at, size, file, offset), used


def _frame(data: memoryview, begin: int, length: int) -> tuple[memoryview, int]:
    if begin + length > len(data):
        raise InvalidDelta("a block of the delta is cut off")
    return data[begin : begin + length], begin + length
