"""Which bytes of a file are 16-bit words, and where the same tensor lies in the base.

Only the encoder looks at safetensors headers; a blob names plain byte ranges, so who decodes parses none. A file whose
header breaks any rule is no error: its bytes are compared as bytes.
"""

from __future__ import annotations

import bisect
import itertools
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

_MAX_HEADER_BYTES = 100 * 2**20  # the limit of the safetensors library
_WORD_TYPES = frozenset({"BF16", "F16"})

ReadRange = Callable[[int, int], bytes]


@dataclass(frozen=True, slots=True)
class Tensor:
    """Bytes [begin, end) of the file."""

    name: str
    dtype: str
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin

    @property
    def is_words(self) -> bool:
        """Whether its numbers are 16-bit floating point."""
        return self.dtype in _WORD_TYPES and self.size % 2 == 0


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive bytes of a target file. `base`: file index and offset of as many bytes in the base, if there are.

    `twin`: file index and offset of an earlier run of the target that may have the same bytes (a tied tensor).
    """

    offset: int
    size: int
    words: bool = False
    base: tuple[int, int] | None = None
    twin: tuple[int, int] | None = None

    @property
    def end(self) -> int:
        return self.offset + self.size


def tensors_of(read: ReadRange, size: int) -> list[Tensor] | None:
    """The tensors of a safetensors file in order of their bytes; None if it is not a well-formed one.

    `read(offset, count)` gives bytes of the file, which has `size` of them.
    """
    if size < 8:
        return None
    (length,) = struct.unpack("<Q", read(0, 8))
    if length > min(_MAX_HEADER_BYTES, size - 8):
        return None
    try:
        header = json.loads(read(8, length))
        tensors = [_tensor(name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    at = 8 + length
    for tensor in tensors:
        if not at <= tensor.begin <= tensor.end <= size:
            return None
        at = tensor.end
    return tensors


def runs_of(
    target: list[Tensor] | None,
    size: int,
    base: list[Tensor] | None,
    base_file: tuple[int, int] | None,
    twins: Mapping[int, tuple[int, int]],
) -> list[Run]:
    """Runs that tile a target file of `size` bytes. `base_file`: index and size of the base's file of that name.

    With tensors on both sides, each is held against the base's tensor of the same name, type and size; the rest (the
    header) against the bytes at the same place. Without, the file is one run. `twins`: by a tensor's begin, where an
    earlier tensor of the target may have the same bytes.
    """
    runs: list[Run] = []
    at = 0
    for run in _tensor_runs(target, base, base_file, twins):
        if run.offset > at:
            _append(runs, _plain(at, run.offset - at, size, base_file))
        _append(runs, run)
        at = run.end
    if size > at:
        _append(runs, _plain(at, size - at, size, base_file))
    return runs


def _tensor_runs(
    target: list[Tensor] | None,
    base: list[Tensor] | None,
    base_file: tuple[int, int] | None,
    twins: Mapping[int, tuple[int, int]],
) -> Iterator[Run]:
    known = {tensor.name: tensor for tensor in base or ()}
    for tensor in target or ():
        old = known.get(tensor.name)
        same = old is not None and (old.dtype, old.size) == (tensor.dtype, tensor.size)
        place = (base_file[0], old.begin) if base_file is not None and old is not None and same else None
        if tensor.size:
            yield Run(tensor.begin, tensor.size, tensor.is_words, place, twins.get(tensor.begin))


def _plain(offset: int, count: int, size: int, base_file: tuple[int, int] | None) -> Run:
    """Bytes that belong to no tensor: held against the base's if its file reaches so far."""
    reaches = base_file is not None and (offset + count <= base_file[1] if count < size else size == base_file[1])
    return Run(offset, count, base=(base_file[0], offset) if base_file is not None and reaches else None)


def pieces_of(runs: list[Run], begin: int, end: int, most: int) -> list[Run]:
    """The parts of `runs` within bytes [begin, end), each at most `most` bytes, words never cut in two.

    A byte of a word that the cut at `begin` or `end` leaves alone becomes a piece without words.
    """
    pieces: list[Run] = []
    start = max(0, bisect.bisect_right(runs, begin, key=lambda run: run.offset) - 1)
    for run in itertools.takewhile(lambda run: run.offset < end, runs[start:]):
        at, stop = max(run.offset, begin), min(run.end, end)
        while at < stop:
            size = min(most, stop - at)
            odd = run.words and (at - run.offset) % 2 == 1
            if run.words:
                size = 1 if odd or size == 1 else size - size % 2
            pieces.append(_part(run, at, size, run.words and size > 1))
            at += size
    return pieces


def _part(run: Run, at: int, size: int, words: bool) -> Run:
    skipped = at - run.offset
    base = None if run.base is None else (run.base[0], run.base[1] + skipped)
    twin = None if run.twin is None else (run.twin[0], run.twin[1] + skipped)
    return Run(at, size, words, base, twin)


def _append(runs: list[Run], run: Run) -> None:
    """Add a run, or lengthen the last one if both sides simply go on (words always begin at a whole word)."""
    last = runs[-1] if runs else None
    goes_on = (
        last is not None
        and last.words == run.words
        and last.twin is None
        and run.twin is None
        and last.end == run.offset
        and run.base == (None if last.base is None else (last.base[0], last.base[1] + last.size))
    )
    if last is not None and goes_on:
        runs[-1] = replace(last, size=last.size + run.size)
    else:
        runs.append(run)


def _tensor(name: str, entry: object, data_begin: int) -> Tensor:
    if not isinstance(entry, dict):
        raise TypeError("a tensor's entry is an object")
    begin, end = entry["data_offsets"]
    dtype = entry["dtype"]
    for value in (begin, end):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError("offsets are whole numbers")
    if not isinstance(dtype, str):
        raise TypeError("a dtype is a string")
    return Tensor(name, dtype, data_begin + begin, data_begin + end)
