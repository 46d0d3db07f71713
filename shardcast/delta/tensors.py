"""A delta applied straight to the tensors of an engine that holds its base's weights: no file is read or written.

All or nothing: the base's bytes in memory are held against its manifest, the whole result against the version's, and only
then is the first byte written. That reads the model three times, with the memory of one section.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from protocol.manifest import Manifest, ManifestFile, manifest_digest
from shardcast.delta.blob import Kind, ReadBlob
from shardcast.delta.decode import DeltaView
from shardcast.delta.errors import BaseUnreadable, InvalidDelta, NotTheBaseError
from shardcast.delta.frames import Bytes
from shardcast.delta.layout import Tensor, tensors_of
from shardcast.delta.views import View


class TensorsView:
    """The safetensors files of a version, of which the tensors lie in memory.

    `headers`: by path, a file's bytes before the first tensor (8 + the length that they begin with). `tensors`: by name,
    of any dtype; they must be contiguous, and each holds its tensor's bytes as the file does.
    """

    def __init__(
        self, files: Sequence[ManifestFile], headers: Mapping[str, bytes], tensors: Mapping[str, NDArray[np.generic]]
    ) -> None:
        """Raises NotTheBaseError if the tensors are not those that the headers describe."""
        self.files = files
        self._headers = headers
        self._pieces: dict[int, list[tuple[int, Bytes]]] = {}
        for index, file in enumerate(files):
            if file.path in headers:
                self._pieces[index] = _pieces(file, headers[file.path], tensors)

    @property
    def held(self) -> frozenset[str]:
        """The paths of the files that are in memory."""
        return frozenset(self.files[index].path for index in self._pieces)

    def read(self, file: int, offset: int, out: Bytes) -> None:
        for piece, inner in self._overlaps(file, offset, len(out)):
            out[inner] = piece

    def write(self, file: int, offset: int, data: Bytes) -> None:
        """Put bytes where they belong; those of a header stay as they are."""
        for piece, inner in self._overlaps(file, offset, len(data)):
            if piece.flags.writeable:
                piece[:] = data[inner]

    def _overlaps(self, file: int, offset: int, count: int) -> Iterator[tuple[Bytes, slice]]:
        if file not in self._pieces:
            raise BaseUnreadable(f"{self.files[file].path} is not in memory")
        for begin, piece in self._pieces[file]:
            first, stop = max(begin, offset), min(begin + len(piece), offset + count)
            if first < stop:
                yield piece[first - begin : stop - begin], slice(first - offset, stop - offset)


def apply_to_tensors(held: TensorsView, base: Manifest, target: Manifest, read_blob: ReadBlob) -> None:
    """Turn the base's tensors into the target's, in place. Blocking.

    Raises NotTheBaseError if `base` is not what the delta was made from or the tensors are not the base's, InvalidDelta if
    the result would not be the target or can't be made in place (the layout of a file changed). Nothing was written then.
    """
    delta = target.delta
    if delta is None or manifest_digest(base.to_json_bytes()) != delta.base_digest:
        raise NotTheBaseError(f"version {target.policy_version} is no difference to version {base.policy_version}")
    places = {file.path: file for file in target.files}
    for file in base.files:
        if file.path in held.held and (file.path not in places or places[file.path].size != file.size):
            raise InvalidDelta(f"{file.path} is laid out otherwise in version {target.policy_version}: load it whole")
    mine = [shard for shard in base.shards if base.files[shard.file].path in held.held]
    if any(_hash(_read(held, shard.file, shard.offset, shard.size)) != shard.digest.hex for shard in mine):
        raise NotTheBaseError(f"the tensors in memory are not those of version {base.policy_version}")
    view = DeltaView(held, target, read_blob, delta.size)
    sections = [index for index, each in enumerate(view.sections) if target.files[each.file].path in held.held]
    for index in sections:
        _check_section(view, base, target, index)
    numbers = {file.path: index for index, file in enumerate(base.files)}
    for index in reversed(sections):  # a tied tensor is made out of what lies before it, while that is still the base's
        section = view.sections[index]
        data = _read(view, section.file, section.offset, section.size)
        held.write(numbers[target.files[section.file].path], section.offset, data)


def _check_section(view: DeltaView, base: Manifest, target: Manifest, index: int) -> None:
    """What a section makes is the target's, and is made of what lies at the same place in the base. Raises InvalidDelta."""
    section = view.sections[index]
    path = target.files[section.file].path
    for block in view.blocks(index):
        needs_base = block.kind in (Kind.COPY, Kind.WORDS, Kind.XOR)
        if needs_base and (base.files[block.file].path, block.offset) != (path, block.at):
            raise InvalidDelta(f"{path} is laid out otherwise in version {target.policy_version}: load it whole")
    data = _read(view, section.file, section.offset, section.size)
    for shard in target.shards[section.first : section.stop]:
        begin = shard.offset - section.offset
        if _hash(data[begin : begin + shard.size]) != shard.digest.hex:
            raise InvalidDelta(f"the delta does not make {path} of version {target.policy_version}")


def _read(view: View, file: int, offset: int, size: int) -> Bytes:
    out = np.empty(size, np.uint8)
    view.read(file, offset, out)
    return out


def _hash(data: Bytes) -> str:
    return hashlib.sha256(data.data).hexdigest()


def _pieces(file: ManifestFile, header: bytes, tensors: Mapping[str, NDArray[np.generic]]) -> list[tuple[int, Bytes]]:
    found = tensors_of(lambda offset, count: header[offset : offset + count], file.size)
    if found is None or len(header) != (found[0].begin if found else file.size):
        raise NotTheBaseError(f"the header of {file.path} is not that of a safetensors file of {file.size} bytes")
    pieces = [(0, np.frombuffer(header, np.uint8))]  # not writable: a header never changes in place
    at = len(header)
    for tensor in found:
        if tensor.begin != at:
            raise NotTheBaseError(f"{file.path} has bytes that belong to no tensor")
        pieces.append((tensor.begin, _bytes_of(tensor, tensors)))
        at = tensor.end
    if at != file.size:
        raise NotTheBaseError(f"{file.path} has bytes that belong to no tensor")
    return pieces


def _bytes_of(tensor: Tensor, tensors: Mapping[str, NDArray[np.generic]]) -> Bytes:
    array = tensors.get(tensor.name)
    if array is None or array.nbytes != tensor.size or not array.flags.c_contiguous or not array.flags.writeable:
        raise NotTheBaseError(f"the tensor {tensor.name!r:.80} is not here as {tensor.size} contiguous, writable bytes")
    return array.reshape(-1).view(np.uint8)
