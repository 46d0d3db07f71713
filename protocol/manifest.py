"""Manifests: what one policy version consists of, down to the byte ranges that travel.

A version's content is a set of files; shards are consecutive byte ranges of those files, never cut copies. The
manifest's exact JSON bytes are signed by the trainer's key, and their SHA-256, `manifest_digest(payload)`, is the
digest that the version number names for ever.

A shard's digest is the SHA-256 of its bytes. A file's digest is the SHA-256 over the 32-byte digests of its shards
in order, and the total digest is the same over all shards of the version. So every byte is hashed once, by whoever
writes it and by whoever receives it, and shards that arrive in any order still prove the whole. (These two are
therefore not what `sha256sum` prints for the file.)

Everything here is checked before use: a `Manifest` that exists is well formed. What is wrong raises
`InvalidManifest`, a SourceFault, since outside the trainer a manifest always comes from a source.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.blob import check_range
from protocol.delta import DeltaSection, delta_from_json, delta_to_json
from protocol.digest import Digest, InvalidManifest, tree_digest
from protocol.packed import PackedSection, packed_from_json, packed_to_json
from protocol.signing import MANIFEST, Identity, SignedEnvelope, open_envelope

FORMAT = 1

MAX_FILES = 4096
MAX_SHARDS = 262_144
MAX_SHARD_BYTES = 256 * 2**20
DEFAULT_SHARD_BYTES = 2 * 2**20  # small, so that a tree of relays works as a pipeline
MAX_TOTAL_BYTES = 16 * 2**40
MAX_VERSION = 2**53 - 1  # exact in every JSON reader
MAX_PATH_BYTES = 1024
MAX_COMPONENT_BYTES = 255
MAX_PAYLOAD_BYTES = 32 * 2**20
MAX_ENVELOPE_BYTES = MAX_PAYLOAD_BYTES // 3 * 4 + 1024

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_INFO_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """One file: its relative POSIX path, size in bytes, and the digest over its shards' digests."""

    path: str
    size: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class Shard:
    """Bytes [offset, offset + size) of `files[file]`, and their SHA-256."""

    file: int
    offset: int
    size: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class Manifest:
    """One policy version. Construction checks every rule and raises InvalidManifest."""

    run_id: str
    policy_version: int
    files: tuple[ManifestFile, ...]
    shards: tuple[Shard, ...]
    total_digest: Digest
    delta: DeltaSection | None = None
    torrent_info_hash: str | None = None
    packed: PackedSection | None = None

    def __post_init__(self) -> None:
        _check_header(self)
        _check_files(self.files)
        _check_cover(self.files, self.shards)
        _check_digests(self)

    @property
    def total_bytes(self) -> int:
        """The size of all files together."""
        return sum(file.size for file in self.files)

    @property
    def kept_bytes(self) -> int:
        """The size of all files and of the blobs that make them: the most that a server keeps of the version."""
        return self.total_bytes + sum(blob.size for blob in (self.delta, self.packed) if blob is not None)

    def to_json_bytes(self) -> bytes:
        """The canonical payload: sorted keys, no spaces, ASCII. These bytes are signed."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "run_id": self.run_id,
            "policy_version": self.policy_version,
            "delta": None if self.delta is None else delta_to_json(self.delta),
            "files": [{"path": f.path, "size": f.size, "digest": f.digest} for f in self.files],
            "shards": [[s.file, s.offset, s.size, s.digest] for s in self.shards],
            "total_digest": self.total_digest,
            "torrent_info_hash": self.torrent_info_hash,
        }
        if self.packed is not None:  # absent otherwise, as in manifests of programs that don't know it
            body["packed"] = packed_to_json(self.packed)
        return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")

    @classmethod
    def from_json_bytes(cls, payload: bytes) -> Manifest:
        """Parse a payload that may come from anyone. Raises InvalidManifest.

        Only the canonical bytes are accepted, so that one manifest has one digest, and a duplicate or unknown
        key, a float, or trailing data can't hide in it.
        """
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise InvalidManifest(f"the manifest has {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES} are allowed")
        body = _json_object(payload, "manifest")
        if body.get("format") != FORMAT:
            raise InvalidManifest(
                f"manifest format {body.get('format')!r:.20} is unknown, this program reads {FORMAT}: update it"
            )
        manifest = _manifest_from(body)
        if manifest.to_json_bytes() != payload:
            raise InvalidManifest("the manifest's JSON is not in canonical form")
        return manifest


def manifest_digest(payload: bytes) -> Digest:
    """The digest that a version number names for ever: SHA-256 of the exact signed payload."""
    return Digest.of(payload)


def sign_manifest(manifest: Manifest, identity: Identity) -> SignedEnvelope:
    """The manifest's canonical bytes, signed by the trainer's key."""
    return identity.sign(MANIFEST, manifest.to_json_bytes())


def open_manifest(envelope: SignedEnvelope, pinned_key_ids: Collection[str]) -> Manifest:
    """Check the signature against the pinned keys, then the content.

    Raises BadSignature or InvalidManifest.
    """
    return Manifest.from_json_bytes(open_envelope(envelope, MANIFEST, pinned_key_ids))


def envelope_to_json(envelope: SignedEnvelope) -> bytes:
    """An envelope as HTTP carries it: `{"payload": base64, "key_id": …, "signature": base64}`."""
    body = {
        "payload": base64.b64encode(envelope.payload).decode("ascii"),
        "key_id": envelope.key_id,
        "signature": base64.b64encode(envelope.signature).decode("ascii"),
    }
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode("ascii")


def envelope_from_json(data: bytes, max_bytes: int = MAX_ENVELOPE_BYTES) -> SignedEnvelope:
    """Read an envelope's JSON form; the signature is not checked here. Raises InvalidManifest."""
    if len(data) > max_bytes:
        raise InvalidManifest(f"the envelope has {len(data)} bytes; at most {max_bytes} are allowed")
    body = _json_object(data, "envelope")
    if set(body) != {"payload", "key_id", "signature"}:
        raise InvalidManifest("an envelope has exactly the fields payload, key_id and signature")
    key_id = _typed(body["key_id"], str, "key_id")
    return SignedEnvelope(_base64(body["payload"], "payload"), key_id, _base64(body["signature"], "signature"))


def check_path(path: str) -> None:
    """Refuse any path that could leave its folder, or that not every file system can hold."""
    if not path or len(path.encode("utf-8", "surrogatepass")) > MAX_PATH_BYTES:
        raise InvalidManifest(f"a file path has 1 to {MAX_PATH_BYTES} bytes: {path!r:.90}")
    if not path.isprintable() or "\\" in path or ":" in path:
        raise InvalidManifest(f"the file path {path!r:.90} holds a backslash, a colon or an unprintable character")
    for component in path.split("/"):
        if component in ("", ".", ".."):
            raise InvalidManifest(f"the file path {path!r:.90} is absolute or holds an empty, '.' or '..' part")
        if len(component.encode()) > MAX_COMPONENT_BYTES:
            raise InvalidManifest(f"a part of the file path {path!r:.90} is over {MAX_COMPONENT_BYTES} bytes")


def _check_header(manifest: Manifest) -> None:
    if not _RUN_ID.fullmatch(manifest.run_id):
        raise InvalidManifest(f"a run id has 1 to 128 of A-Z a-z 0-9 . _ -, not {manifest.run_id!r:.90}")
    check_range(manifest.policy_version, 0, MAX_VERSION, "policy_version")
    if manifest.delta is not None and manifest.delta.base_version >= manifest.policy_version:
        raise InvalidManifest(f"version {manifest.policy_version} has the later base {manifest.delta.base_version}")
    if manifest.torrent_info_hash is not None and not _INFO_HASH.fullmatch(manifest.torrent_info_hash):
        raise InvalidManifest("torrent_info_hash has 40 or 64 hex digits")


def _check_files(files: Sequence[ManifestFile]) -> None:
    if not 1 <= len(files) <= MAX_FILES:
        raise InvalidManifest(f"a version has 1 to {MAX_FILES} files, this one {len(files)}")
    seen: set[str] = set()
    for file in files:
        check_path(file.path)
        check_range(file.size, 0, MAX_TOTAL_BYTES, f"size of {file.path}")
        folded = file.path.casefold()  # two names that differ in case are one file on some systems
        if folded in seen:
            raise InvalidManifest(f"the file {file.path!r} is listed twice")
        seen.add(folded)
    for path in seen:
        parts = path.split("/")
        if any("/".join(parts[:depth]) in seen for depth in range(1, len(parts))):
            raise InvalidManifest(f"{path!r} lies under a path that is itself a file")
    if sum(file.size for file in files) > MAX_TOTAL_BYTES:
        raise InvalidManifest(f"the files together exceed {MAX_TOTAL_BYTES} bytes")


def _check_cover(files: Sequence[ManifestFile], shards: Sequence[Shard]) -> None:
    """Shards must tile every file exactly: in order, without gap or overlap, never empty."""
    if len(shards) > MAX_SHARDS:
        raise InvalidManifest(f"a version has at most {MAX_SHARDS} shards, this one {len(shards)}")
    at = 0
    for index, file in enumerate(files):
        offset = 0
        while offset < file.size:
            if at == len(shards):
                raise InvalidManifest(f"no shard covers {file.path!r} from byte {offset} on")
            shard = shards[at]
            check_range(shard.size, 1, MAX_SHARD_BYTES, f"size of shard {at}")
            if (shard.file, shard.offset) != (index, offset):
                raise InvalidManifest(f"shard {at} does not continue {file.path!r} at byte {offset}")
            offset += shard.size
            at += 1
        if offset != file.size:
            raise InvalidManifest(f"shard {at - 1} reaches beyond the end of {file.path!r}")
    if at != len(shards):
        raise InvalidManifest(f"shard {at} belongs to no file")


def _check_digests(manifest: Manifest) -> None:
    per_file: list[list[Digest]] = [[] for _ in manifest.files]
    for shard in manifest.shards:
        per_file[shard.file].append(shard.digest)
    for file, digests in zip(manifest.files, per_file, strict=True):
        if tree_digest(digests) != file.digest:
            raise InvalidManifest(f"the digest of {file.path!r} does not follow from its shards")
    if tree_digest(shard.digest for shard in manifest.shards) != manifest.total_digest:
        raise InvalidManifest("the total digest does not follow from the shards")


def _manifest_from(body: Mapping[str, Any]) -> Manifest:
    try:
        delta = body["delta"]
        info_hash = body["torrent_info_hash"]
        return Manifest(
            run_id=_typed(body["run_id"], str, "run_id"),
            policy_version=_typed(body["policy_version"], int, "policy_version"),
            delta=None if delta is None else delta_from_json(delta),
            files=_files_from(_typed(body["files"], list, "files")),
            shards=_shards_from(_typed(body["shards"], list, "shards")),
            total_digest=Digest(body["total_digest"]),
            torrent_info_hash=None if info_hash is None else _typed(info_hash, str, "torrent_info_hash"),
            packed=packed_from_json(body["packed"]) if "packed" in body else None,
        )
    except KeyError as error:
        raise InvalidManifest(f"the manifest lacks the field {error}") from None


def _files_from(items: list[Any]) -> tuple[ManifestFile, ...]:
    if len(items) > MAX_FILES:
        raise InvalidManifest(f"a version has at most {MAX_FILES} files, this one {len(items)}")
    files = []
    for item in items:
        entry = _typed(item, dict, "files[]")
        path = _typed(entry["path"], str, "path")
        files.append(ManifestFile(path, _typed(entry["size"], int, "size"), Digest(entry["digest"])))
    return tuple(files)


def _shards_from(items: list[Any]) -> tuple[Shard, ...]:
    if len(items) > MAX_SHARDS:
        raise InvalidManifest(f"a version has at most {MAX_SHARDS} shards, this one {len(items)}")
    shards = []
    for item in items:
        if len(_typed(item, list, "shards[]")) != 4:
            raise InvalidManifest("a shard reads [file, offset, size, digest]")
        file, offset, size = (_typed(value, int, "shards[]") for value in item[:3])
        shards.append(Shard(file, offset, size, Digest(item[3])))
    return tuple(shards)


def _json_object(data: bytes, what: str) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidManifest(f"the {what} is not JSON: {error!s:.90}") from None
    if not isinstance(body, dict):
        raise InvalidManifest(f"the {what} is not a JSON object")
    return body


def _typed(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidManifest(f"{name} should be {kind.__name__}, not {type(value).__name__}")
    return value


def _base64(value: Any, name: str) -> bytes:
    try:
        return base64.b64decode(_typed(value, str, name), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidManifest(f"{name} is not base64") from None
