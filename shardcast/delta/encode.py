"""Makes the blob that turns one version's files into another's. Same files, same bytes: no clock, no randomness.

Memory: what is found out about a block per thread, and the sections in flight; base and target are only mapped. The
trainer runs this beside its next step.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from protocol.blob import BlobShard
from protocol.delta import CODEC_WORDS, DeltaSection
from protocol.digest import Digest, tree_digest
from protocol.manifest import Manifest
from protocol.packed import CODEC_PLANES, PackedSection
from shardcast.delta.blob import (
    HEAD,
    MAGIC,
    MAX_BLOCK_BYTES,
    MAX_BLOCKS,
    SPAN,
    Block,
    Kind,
    Section,
    sections_of,
)
from shardcast.delta.frames import Bytes, join_parts
from shardcast.delta.layout import Run, Tensor, pieces_of, runs_of, tensors_of
from shardcast.delta.planes import pack_planes
from shardcast.delta.views import FolderView
from shardcast.delta.words import Words, encode_words

_TWIN_BYTES = 65_536  # smaller tensors are not looked up among the others
_LOOKED_AT = 4096
_MUCH = 0.6  # of the bytes: exponents and all, words without a base weigh about 0.67


class DeltaTooLargeError(Exception):
    """The blob would exceed the limit that was given: the version is better sent in full."""


def encode_delta(
    base: FolderView,
    target: FolderView,
    manifest: Manifest,
    path: Path,
    *,
    limit: int,
    threads: int = 1,
    span: int = SPAN,
) -> None:
    """Write the blob that makes `target`, whose manifest is given, out of `base`. Blocking.

    Raises DeltaTooLargeError once it is over `limit` bytes, OSError if the disk refuses, and leaves the file then.
    """
    sections = sections_of(manifest.shards, span)
    encoder = _Encoder(base, target, sections)
    table = bytearray()
    with path.open("wb") as file:
        at = file.write(HEAD.pack(MAGIC, span, len(sections)) + bytes(4 * len(sections)))
        for section in _in_order(encoder, len(sections), threads):
            size = sum(map(len, section))
            table += struct.pack("<I", size)
            file.writelines(section)
            at += size
            if at > limit:
                raise DeltaTooLargeError(f"over {limit} bytes")
        file.seek(HEAD.size)
        file.write(table)


def encode_packed(folder: Path, manifest: Manifest, path: Path, *, limit: int, threads: int = 1) -> None:
    """Write the blob that makes the files of a folder, whose manifest is given, out of nothing. Blocking.

    It has a section for each shard, so that who receives it can make shards while it comes. Raises as `encode_delta`.
    """
    span = min(SPAN, max(shard.size for shard in manifest.shards))
    with FolderView(folder, ()) as nothing, FolderView(folder, manifest.files) as target:
        encode_delta(nothing, target, manifest, path, limit=limit, threads=threads, span=span)


def delta_section(path: Path, base_version: int, base_digest: Digest, shard_bytes: int) -> DeltaSection:
    """What the manifest says of a delta's blob: one hashing pass. Blocking."""
    size, digest, shards = _shards_of(path, shard_bytes)
    return DeltaSection(CODEC_WORDS, base_version, base_digest, size, digest, shards)


def packed_section(path: Path, shard_bytes: int) -> PackedSection:
    """What the manifest says of a packed version's blob: one hashing pass. Blocking."""
    return PackedSection(CODEC_PLANES, *_shards_of(path, shard_bytes))


def _shards_of(path: Path, shard_bytes: int) -> tuple[int, Digest, tuple[BlobShard, ...]]:
    shards: list[BlobShard] = []
    with path.open("rb") as file:
        offset = 0
        while chunk := file.read(shard_bytes):
            shards.append(BlobShard(offset, len(chunk), Digest.from_raw(hashlib.sha256(chunk).digest())))
            offset += len(chunk)
    return offset, tree_digest(shard.digest for shard in shards), tuple(shards)


def _in_order(encoder: _Encoder, count: int, threads: int) -> Iterator[list[bytes | memoryview]]:
    if threads == 1:
        yield from map(encoder.section, range(count))
        return
    with ThreadPoolExecutor(threads) as pool:
        for begin in range(0, count, 2 * threads):  # so that few finished sections wait for their turn
            yield from pool.map(encoder.section, range(begin, min(count, begin + 2 * threads)))


class _Encoder:
    def __init__(self, base: FolderView, target: FolderView, sections: Sequence[Section]) -> None:
        self._base = base
        self._target = target
        self._sections = sections
        self._runs = _plan(base, target)

    def section(self, index: int) -> list[bytes | memoryview]:
        """The blocks of a section, in pieces."""
        place = self._sections[index]
        pieces = pieces_of(self._runs[place.file], place.offset, place.offset + place.size, MAX_BLOCK_BYTES)
        blocks: list[Block] = []
        for piece in pieces:
            _append(blocks, self._block(place.file, piece))
        if len(blocks) > MAX_BLOCKS:
            raise DeltaTooLargeError(f"section {index} would need {len(blocks)} blocks")
        return [piece for block in blocks for piece in block.pieces()]

    def _block(self, file: int, piece: Run) -> Block:
        new = self._target.mapped(file, piece.offset, piece.size)
        if piece.twin is not None and np.array_equal(self._target.mapped(*piece.twin, piece.size), new):
            return Block(Kind.TWIN, piece.offset, piece.size, *piece.twin)
        if piece.base is None:
            return _planes(piece, new) if piece.words else _raw(piece, new)
        old = self._base.mapped(*piece.base, piece.size)
        if piece.words:
            return _words(piece, piece.base, old, new)
        if np.array_equal(old, new):
            return Block(Kind.COPY, piece.offset, piece.size, *piece.base)
        return _xor(piece, piece.base, old, new)


def _raw(piece: Run, new: Bytes) -> Block:
    frame, size = join_parts([new])
    return Block(Kind.RAW, piece.offset, piece.size, 0, 0, None, frame, size)


def _xor(piece: Run, base: tuple[int, int], old: Bytes, new: Bytes) -> Block:
    frame, size = join_parts([old ^ new])
    return Block(Kind.XOR, piece.offset, piece.size, *base, None, frame, size)


def _words(piece: Run, base: tuple[int, int], old: Bytes, new: Bytes) -> Block:
    found = encode_words(_as_words(old), _as_words(new))
    if found is None:
        return Block(Kind.COPY, piece.offset, piece.size, *base)
    head, parts = found
    frame, size = join_parts(parts)
    if len(frame) < _MUCH * piece.size:
        return Block(Kind.WORDS, piece.offset, piece.size, *base, head, frame, size)
    planes = _planes(piece, new)  # so many words changed that the base is of little use
    if len(planes.frame) + len(planes.plain) <= len(frame):
        return planes
    return Block(Kind.WORDS, piece.offset, piece.size, *base, head, frame, size)


def _planes(piece: Run, new: Bytes) -> Block:
    frame, others = pack_planes(_as_words(new))
    if len(frame) < len(others):
        return Block(Kind.PLANES, piece.offset, piece.size, 0, 0, None, frame, len(others), others.data)
    return _raw(piece, new)


def _as_words(data: Bytes) -> Words:
    """Bytes as words where they lie, or where they lie at an odd address, elsewhere."""
    return (data if data.ctypes.data % 2 == 0 else data.copy()).view(np.uint16)


def _plan(base: FolderView, target: FolderView) -> list[list[Run]]:
    """For each file of the target, where its bytes come from."""
    places = {file.path: index for index, file in enumerate(base.files)}
    tensors = [_tensors(target, index) for index in range(len(target.files))]
    twins = _twins(target, tensors)
    runs = []
    for index, file in enumerate(target.files):
        at = places.get(file.path)
        base_tensors = None if at is None or tensors[index] is None else _tensors(base, at)
        base_file = None if at is None else (at, base.files[at].size)
        runs.append(runs_of(tensors[index], file.size, base_tensors, base_file, twins.get(index, {})))
    return runs


def _tensors(view: FolderView, file: int) -> list[Tensor] | None:
    if not view.files[file].path.endswith(".safetensors"):
        return None
    return tensors_of(lambda offset, count: _bytes_of(view, file, offset, count).tobytes(), view.files[file].size)


def _twins(target: FolderView, tensors: list[list[Tensor] | None]) -> dict[int, dict[int, tuple[int, int]]]:
    """By file and begin: large tensors that look like an earlier one, as tied embeddings do. Pieces are compared later."""
    first: dict[tuple[str, int, bytes], tuple[int, int]] = {}
    twins: dict[int, dict[int, tuple[int, int]]] = {}
    for file, listed in enumerate(tensors):
        for tensor in listed or ():
            if tensor.size < _TWIN_BYTES:
                continue
            middle = tensor.begin + tensor.size // 2
            looks = b"".join(_bytes_of(target, file, at, _LOOKED_AT).tobytes() for at in (tensor.begin, middle))
            earlier = first.setdefault((tensor.dtype, tensor.size, looks), (file, tensor.begin))
            if earlier != (file, tensor.begin):
                twins.setdefault(file, {})[tensor.begin] = earlier
    return twins


def _bytes_of(view: FolderView, file: int, offset: int, count: int) -> Bytes:
    out = np.empty(count, np.uint8)
    view.read(file, offset, out)
    return out


def _append(blocks: list[Block], block: Block) -> None:
    """Add a block; copies that simply go on become one."""
    last = blocks[-1] if blocks else None
    if (
        last is not None
        and last.kind is block.kind
        and block.kind in (Kind.COPY, Kind.TWIN)
        and (last.file, last.offset + last.size) == (block.file, block.offset)
    ):
        blocks[-1] = Block(last.kind, last.at, last.size + block.size, last.file, last.offset)
    else:
        blocks.append(block)
