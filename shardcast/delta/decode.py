"""A version as its base and a delta make it: bytes are made when they are read, and nothing is written.

Views can be stacked, so a chain of deltas needs no version in between. What is read is not proven: the caller holds it
against the digests of the version's shards.
"""

from __future__ import annotations

import bisect
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from protocol.manifest import Manifest, ManifestFile
from shardcast.delta.blob import Blob, Block, Kind, ReadBlob, Section
from shardcast.delta.errors import InvalidDelta
from shardcast.delta.frames import Bytes, Parts, open_frame
from shardcast.delta.planes import join_planes
from shardcast.delta.views import View
from shardcast.delta.words import Words, decode_words

_KEPT_BLOCKS = 2  # made in part only, and likely to be asked for the rest


class DeltaView:
    """The target's bytes, out of a view of the base and a blob of `size` bytes. Reading raises InvalidDelta."""

    def __init__(self, base: View, target: Manifest, read_blob: ReadBlob, size: int) -> None:
        self._base = base
        self._target = target
        self._blob = Blob(read_blob, size, target, base.files)
        self._starts = [(section.file, section.offset) for section in self._blob.sections]
        self._kept: OrderedDict[tuple[int, int], Bytes] = OrderedDict()
        self._kept_lock = threading.Lock()

    @property
    def files(self) -> Sequence[ManifestFile]:
        return self._target.files

    def read(self, file: int, offset: int, out: Bytes) -> None:
        self._read(file, offset, out, twins=True)

    @property
    def sections(self) -> Sequence[Section]:
        """What is best read in one go."""
        return self._blob.sections

    def place(self, section: int) -> tuple[int, int]:
        """Where a section lies in the blob: offset and size."""
        return self._blob.places[section]

    def blocks(self, section: int) -> list[Block]:
        """The blocks of a section."""
        return self._blob.blocks(section)

    def _read(self, file: int, offset: int, out: Bytes, *, twins: bool) -> None:
        end = offset + len(out)
        at = offset
        section = bisect.bisect_right(self._starts, (file, offset)) - 1
        while at < end:
            for block in self._blob.blocks(section):
                first, stop = max(block.at, offset), min(block.at + block.size, end)
                if first < stop:
                    self._make(block, file, first - block.at, out[first - offset : stop - offset], twins)
                    at = stop
            section += 1

    def _make(self, block: Block, file: int, skip: int, out: Bytes, twins: bool) -> None:
        """Fill `out` with the block's bytes from `skip` on."""
        if block.kind is Kind.COPY:
            self._base.read(block.file, block.offset + skip, out)
        elif block.kind is Kind.TWIN:
            if not twins:
                raise InvalidDelta("a block of the delta copies a copy")
            self._read(block.file, block.offset + skip, out, twins=False)
        elif len(out) == block.size:
            self._decode(block, out)
        else:
            out[:] = self._whole(block, file)[skip : skip + len(out)]

    def _whole(self, block: Block, file: int) -> Bytes:
        key = (file, block.at)
        with self._kept_lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = np.empty(block.size, np.uint8)
        self._decode(block, made)
        with self._kept_lock:
            self._kept[key] = made
            while len(self._kept) > _KEPT_BLOCKS:
                self._kept.popitem(last=False)
        return made

    def _decode(self, block: Block, out: Bytes) -> None:
        content = open_frame(block.frame, block.content_size)
        if block.kind is Kind.RAW:
            out[:] = content
            return
        buffer = out if out.ctypes.data % 2 == 0 else np.empty(len(out), np.uint8)  # words are read where they lie
        if block.kind is Kind.PLANES:
            join_planes(content, np.frombuffer(block.plain, np.uint8), buffer.view(np.uint16))
        elif block.kind is Kind.XOR:
            self._base.read(block.file, block.offset, buffer)
            buffer ^= content
        else:
            self._decode_words(block, Parts(content), buffer.view(np.uint16))
        if buffer is not out:
            out[:] = buffer

    def _decode_words(self, block: Block, parts: Parts, words: Words) -> None:
        def read(begin: int, out: Words) -> None:
            self._base.read(block.file, block.offset + 2 * begin, out.view(np.uint8))

        assert block.head is not None
        if isinstance(self._base, DeltaView):  # it makes whole blocks, so it is asked for nothing less
            read(0, words)
            decode_words(block.head, parts, words)
        else:
            decode_words(block.head, parts, words, read)
        parts.end()


class BlobFile:
    """A blob on disk, open as long as it is needed; `read` may be called from several threads.

    `check(offset, count)` is called before each reading, and raises if those bytes are not to be relied on.
    """

    def __init__(self, path: Path, check: Callable[[int, int], None] = lambda offset, count: None) -> None:
        self._check = check
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        self.size = os.fstat(self._descriptor).st_size

    def read(self, offset: int, count: int) -> bytes:
        """Raises InvalidDelta if the file is shorter."""
        self._check(offset, count)
        data = os.pread(self._descriptor, count, offset)
        while 0 < len(data) < count:
            more = os.pread(self._descriptor, count - len(data), offset + len(data))
            if not more:
                break
            data += more
        if len(data) < count:
            raise InvalidDelta("the delta's file is shorter than its manifest says")
        return data

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> BlobFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
