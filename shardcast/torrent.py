"""The torrent of a version, derived from its manifest and the SHA-1 of its pieces; nothing else enters it.

BitTorrent v1 (BEP 3) with padding (BEP 47), private (BEP 27). Every file of the manifest begins at a piece, and pieces
divide shards, so that a shard is a whole number of pieces. The torrent's name is the version number and its files are
called by their place in the manifest, so that no name from outside reaches a BitTorrent library, and the URL of a web
seed (BEP 19) is `…/v1/files/<version>/<place>`. Empty files are left out: there is nothing to send.

A torrent is believed only if its bytes are exactly those that the manifest and the hashes within it give, and their
SHA-1 is the info-hash that the trainer signed. So nothing here parses what came from outside.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protocol.errors import SourceFault
from protocol.manifest import Manifest, Shard

_MIN_PIECE_BYTES = 16 * 1024
_FIRST_PIECE_BYTES = 64 * 1024
_PIECE_BYTES = 1024 * 1024
_FEW_PIECES = 1024  # a piece is passed on when it is whole: with fewer, a swarm is slow to start
_MANY_PIECES = 16_384  # above so many, pieces grow as far as shards allow
_HASH_BYTES = 20


class InvalidTorrent(SourceFault):
    """A torrent that is not the one which the manifest names."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a version's files lie among the pieces of its torrent."""

    version: int
    sizes: tuple[int, ...]  # of the manifest's files, in order
    piece_bytes: int

    @classmethod
    def of(cls, manifest: Manifest) -> Layout | None:
        """The layout that a manifest has; None if its shards can't be cut into pieces, or there is nothing to send."""
        sizes = [file.size for file in manifest.files]
        return cls.for_files(manifest.policy_version, sizes, (shard.offset for shard in manifest.shards))

    @classmethod
    def for_files(cls, version: int, sizes: Sequence[int], offsets: Iterable[int]) -> Layout | None:
        """The layout of files of these sizes whose shards begin at these offsets."""
        total = sum(sizes)
        found = _piece_bytes(total, offsets)
        return cls(version, tuple(sizes), found) if found and total else None

    @property
    def files(self) -> list[int]:
        """The manifest's places of the torrent's files that hold bytes."""
        return [place for place, size in enumerate(self.sizes) if size]

    @property
    def first_pieces(self) -> list[int]:
        """The piece with which each of the manifest's files begins."""
        firsts, at = [], 0
        for size in self.sizes:
            firsts.append(at)
            at += self._pieces_in(size)
        return firsts

    @property
    def pieces(self) -> int:
        """How many pieces there are."""
        return sum(map(self._pieces_in, self.sizes))

    def pieces_of(self, shards: Sequence[Shard]) -> list[range]:
        """The pieces that make up each shard."""
        firsts = self.first_pieces
        found = []
        for shard in shards:
            first = firsts[shard.file] + shard.offset // self.piece_bytes
            found.append(range(first, first + self._pieces_in(shard.size)))
        return found

    def padded(self, piece: int, data: bytes) -> bytes:
        """A piece's bytes as BitTorrent has them: where a file ends within it, with the zeros up to the next."""
        return data if piece == self.pieces - 1 else data.ljust(self.piece_bytes, b"\0")

    def places(self) -> dict[int, int]:
        """Place in the torrent, padding counted, to place in the manifest."""
        found, at = {}, 0
        for place in self.files:
            found[at] = place
            at += 2 if self._padding(place) else 1
        return found

    def info(self, piece_hashes: bytes) -> bytes:
        """The bencoded info dictionary; its SHA-1 is the info-hash."""
        head, tail = self._around_hashes()
        return head + piece_hashes + tail

    def info_hash(self, piece_hashes: bytes) -> str:
        """SHA-1 of the info dictionary, in hexadecimal digits."""
        return hashlib.sha1(self.info(piece_hashes)).hexdigest()

    def torrent(self, piece_hashes: bytes) -> bytes:
        """The torrent file: an info dictionary and nothing else."""
        return b"d4:info" + self.info(piece_hashes) + b"e"

    def check(self, torrent: bytes, info_hash: str) -> None:
        """Raise InvalidTorrent unless this is exactly the torrent with that info-hash and this layout."""
        piece_hashes = self.hashes_in(torrent)
        if torrent != self.torrent(piece_hashes):
            raise InvalidTorrent(f"the torrent of version {self.version} doesn't have the layout of its manifest")
        if self.info_hash(piece_hashes) != info_hash:
            raise InvalidTorrent(f"the torrent of version {self.version} doesn't have the info-hash of its manifest")

    def hashes_in(self, torrent: bytes) -> bytes:
        """The hashes of all pieces, joined, in a torrent that passed `check`."""
        start = len(b"d4:info") + len(self._around_hashes()[0])
        return torrent[start : start + self.pieces * _HASH_BYTES]

    @property
    def torrent_size(self) -> int:
        """The bytes of the torrent file."""
        return sum(map(len, self._around_hashes())) + self.pieces * _HASH_BYTES + len(b"d4:infoe")

    def _around_hashes(self) -> tuple[bytes, bytes]:
        files = b"".join(self._file(place) for place in self.files)
        name = str(self.version).encode("ascii")
        hashes = self.pieces * _HASH_BYTES
        head = b"d5:filesl%se4:name%d:%s12:piece lengthi%de6:pieces%d:" % (
            files,
            len(name),
            name,
            self.piece_bytes,
            hashes,
        )
        return head, b"7:privatei1ee"

    def _file(self, place: int) -> bytes:
        name, padding = str(place).encode("ascii"), self._padding(place)
        entry = b"d6:lengthi%de4:pathl%d:%see" % (self.sizes[place], len(name), name)
        if not padding:
            return entry
        pad_name = str(padding).encode("ascii")
        return entry + b"d4:attr1:p6:lengthi%de4:pathl4:.pad%d:%see" % (padding, len(pad_name), pad_name)

    def _padding(self, place: int) -> int:
        """Bytes between a file and the next one's first piece; none after the last."""
        return -self.sizes[place] % self.piece_bytes if place != self.files[-1] else 0

    def _pieces_in(self, size: int) -> int:
        return -(-size // self.piece_bytes)


class PieceHasher:
    """Takes the bytes of a version's files in order and gives the SHA-1 of every piece, padding included."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._hashes: list[bytes] = []
        self._hash = hashlib.sha1()
        self._filled = 0

    def update(self, data: bytes) -> None:
        """The next bytes of the file at hand. Releases the interpreter's lock while it hashes."""
        view = memoryview(data)
        while view:
            part = view[: self._layout.piece_bytes - self._filled]
            self._hash.update(part)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == self._layout.piece_bytes:
                self._end_piece()

    def end_file(self) -> None:
        """The file at hand is over: the next begins with a new piece."""
        if not self._filled:
            return
        if len(self._hashes) < self._layout.pieces - 1:
            self._hash.update(bytes(self._layout.piece_bytes - self._filled))
        self._end_piece()

    def digest(self) -> bytes:
        """All pieces' hashes, joined."""
        assert len(self._hashes) == self._layout.pieces, "every file was hashed to its end"
        return b"".join(self._hashes)

    def _end_piece(self) -> None:
        self._hashes.append(self._hash.digest())
        self._hash = hashlib.sha1()
        self._filled = 0


def _piece_bytes(total: int, offsets: Iterable[int]) -> int | None:
    """A power of two that divides all offsets: 64 KiB to 1 MiB by size, more where that would make very many pieces."""
    common = 0
    for offset in offsets:
        common |= offset
    most = common & -common if common else 1 << 40
    if most < _MIN_PIECE_BYTES:
        return None
    size = min(_FIRST_PIECE_BYTES, most)
    while size * 2 <= most and total > size * (_FEW_PIECES if size < _PIECE_BYTES else _MANY_PIECES):
        size *= 2
    return size
