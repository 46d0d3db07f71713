"""SHA-256 digests as they are written everywhere: a type of its own, so that a value of it is well formed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from protocol.errors import SourceFault

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class InvalidManifest(SourceFault):
    """A manifest, digest or envelope that breaks the rules of this module."""


class Digest(str):
    """`sha256:<64 lower-case hex digits>`; a value of this type is well formed."""

    __slots__ = ()

    def __new__(cls, text: str) -> Digest:
        if not isinstance(text, str) or not _DIGEST.fullmatch(text):
            raise InvalidManifest(f"a digest reads sha256:<64 hex digits>, not {text!r:.90}")
        return super().__new__(cls, text)

    @classmethod
    def of(cls, data: bytes) -> Digest:
        """The digest of `data`."""
        return cls("sha256:" + hashlib.sha256(data).hexdigest())

    @classmethod
    def from_raw(cls, raw: bytes) -> Digest:
        """The digest whose 32 bytes are `raw`."""
        return cls("sha256:" + raw.hex())

    @property
    def hex(self) -> str:
        """The 64 hex digits."""
        return self[7:]

    @property
    def raw(self) -> bytes:
        """The 32 bytes."""
        return bytes.fromhex(self[7:])

    @property
    def short(self) -> str:
        """The first 16 hex digits: for folder names and log lines."""
        return self[7:23]


def tree_digest(shard_digests: Iterable[Digest]) -> Digest:
    """The digest of a file or a version: SHA-256 over its shards' raw digests in order."""
    joined = hashlib.sha256()
    for digest in shard_digests:
        joined.update(digest.raw)
    return Digest.from_raw(joined.digest())
