"""What the trainer does with a version: hash it once, sign it, put it beside the origin, announce it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from protocol.errors import OurFault, UserError
from protocol.manifest import (
    DEFAULT_SHARD_BYTES,
    Digest,
    InvalidManifest,
    Manifest,
    ManifestFile,
    Shard,
    SignedEnvelope,
    envelope_to_json,
    manifest_digest,
    sign_manifest,
    tree_digest,
)
from protocol.rotation import MAX_CHAIN_BYTES, InvalidRotation, chain_from_json
from protocol.signing import Identity
from protocol.trust import why_unreachable
from shardcast.blob_manifest import packed_manifest
from shardcast.config import MIB, parse_source
from shardcast.delta.encode import DeltaTooLargeError, delta_section, encode_delta, encode_packed, packed_section
from shardcast.delta.views import FolderView
from shardcast.layout import incoming_delta, incoming_folder, incoming_packed, incoming_torrent, list_files
from shardcast.names import VersionConflict
from shardcast.partial import disk_errors
from shardcast.torrent import Layout, PieceHasher

ANNOUNCE_TIMEOUT_S = 60.0
WORTH_PACKING = 0.9  # a packed form above this share of the files saves too little for what unpacking costs
WORTH_SENDING = 1 / 4  # a delta above this share of the files saves too little for what applying it costs


@dataclass(frozen=True, slots=True)
class Described:
    """A folder as a version: its manifest, and the torrent that the manifest's info-hash names (None if it has none).

    The torrent is of what clients swap (`blob_manifest.swapped`).
    """

    manifest: Manifest
    torrent: bytes | None
    packed: Path | None = None  # where the version's packed form lies, if it has one


def build_manifest(
    directory: Path, *, run_id: str, policy_version: int, shard_bytes: int = DEFAULT_SHARD_BYTES
) -> Manifest:
    """The manifest of all files below `directory`; see `describe`."""
    return describe(directory, run_id=run_id, policy_version=policy_version, shard_bytes=shard_bytes).manifest


def describe(directory: Path, *, run_id: str, policy_version: int, shard_bytes: int = DEFAULT_SHARD_BYTES) -> Described:
    """The manifest and the torrent of all files below `directory`, in one reading pass. Blocking.

    No clock and no randomness enter it: the same files give the same manifest, so publishing again is idempotent.
    Raises UserError if the folder can't be a version.
    """
    listed = list(list_files(directory))
    sizes = [size for _, size in listed]
    offsets = (offset for size in sizes for offset in range(0, size, shard_bytes))
    layout = Layout.for_files(policy_version, sizes, offsets)
    pieces = None if layout is None else PieceHasher(layout)
    files: list[ManifestFile] = []
    shards: list[Shard] = []
    try:
        for index, (path, size) in enumerate(listed):
            mine = list(_shards_of(directory / path, index, size, shard_bytes, pieces))
            files.append(ManifestFile(path, size, tree_digest(shard.digest for shard in mine)))
            shards.extend(mine)
        hashes = None if pieces is None else pieces.digest()
        manifest = Manifest(
            run_id=run_id,
            policy_version=policy_version,
            files=tuple(files),
            shards=tuple(shards),
            total_digest=tree_digest(shard.digest for shard in shards),
            torrent_info_hash=None if layout is None or hashes is None else layout.info_hash(hashes),
        )
    except InvalidManifest as error:
        raise UserError(f"{directory} can't be published: {error}") from None
    return Described(manifest, None if layout is None or hashes is None else layout.torrent(hashes))


def pack(
    directory: Path,
    manifest: Manifest,
    blob: Path,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    most: float = WORTH_PACKING,
    threads: int = 1,
) -> Described | None:
    """Write the packed form of a folder whose manifest is given to `blob`; the version with it, or None if not worth it.

    `most`: the largest share of the full bytes that it may have. Deterministic for one release of the zstd library.
    Blocking. Raises DiskFullError, BaseUnreadable.
    """
    try:
        with disk_errors(blob.parent):
            encode_packed(directory, manifest, blob, limit=int(most * manifest.total_bytes), threads=threads)
            return describe_packed(replace(manifest, packed=packed_section(blob, shard_bytes)), blob)
    except DeltaTooLargeError:
        blob.unlink(missing_ok=True)
        return None


def describe_packed(manifest: Manifest, blob: Path) -> Described:
    """A version whose packed form lies at `blob`, with the torrent of that. Blocking."""
    content = packed_manifest(manifest)
    layout = Layout.of(content)
    if layout is None:
        return Described(replace(manifest, torrent_info_hash=None), None, blob)
    pieces = PieceHasher(layout)
    with blob.open("rb", buffering=0) as file:
        while chunk := file.read(MIB):
            pieces.update(chunk)
    pieces.end_file()
    hashes = pieces.digest()
    return Described(replace(manifest, torrent_info_hash=layout.info_hash(hashes)), layout.torrent(hashes), blob)


def make_delta(
    base_folder: Path,
    base: Manifest,
    folder: Path,
    manifest: Manifest,
    blob: Path,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    most: float = WORTH_SENDING,
    threads: int = 1,
) -> Manifest | None:
    """Write the delta from a version to a later one; the later one's manifest with it, or None if it is not worth it.

    `most`: the largest share of the full bytes that a delta may have. Deterministic, as `build_manifest` is. Blocking.
    Raises DiskFullError, BaseUnreadable.
    """
    limit = int(most * manifest.total_bytes)
    try:
        with disk_errors(blob.parent), FolderView(base_folder, base.files) as before:
            with FolderView(folder, manifest.files) as after:
                encode_delta(before, after, manifest, blob, limit=limit, threads=threads)
            digest = manifest_digest(base.to_json_bytes())
            return replace(manifest, delta=delta_section(blob, base.policy_version, digest, shard_bytes))
    except DeltaTooLargeError:
        blob.unlink(missing_ok=True)
        return None


async def publish_version(
    source_dir: Path,
    data_dir: Path,
    identity: Identity,
    *,
    origin_url: str,
    run_id: str,
    policy_version: int,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    move: bool = True,
    packed: bool = True,
) -> Digest:
    """Give a folder to the origin that uses `data_dir` on this machine; returns the manifest's digest.

    `move` renames the folder away (copies, across file systems). Without it the files are hard-linked: the caller
    must then never write into them again. `packed`: also publish the packed form, if that is worth it. Idempotent, also
    after a crash at any point, for one release of the zstd library. Raises UserError, VersionConflict (the number is
    taken), DiskFullError, OurFault (the origin can't be reached: try again).
    """
    described = await asyncio.to_thread(
        describe, source_dir, run_id=run_id, policy_version=policy_version, shard_bytes=shard_bytes
    )
    with tempfile.TemporaryDirectory(dir=_incoming(data_dir), prefix=f".{policy_version}.") as scratch:
        if packed:
            blob = Path(scratch) / "packed"
            smaller = await asyncio.to_thread(pack, source_dir, described.manifest, blob, shard_bytes=shard_bytes)
            described = described if smaller is None else smaller
        envelope = sign_manifest(described.manifest, identity)
        await stage(source_dir, data_dir, policy_version, move=move, torrent=described.torrent, packed=described.packed)
    await announce(origin_url, envelope)
    return manifest_digest(envelope.payload)


async def stage(
    source_dir: Path,
    data_dir: Path,
    policy_version: int,
    *,
    move: bool = True,
    torrent: bytes | None = None,
    delta: Path | None = None,
    packed: Path | None = None,
) -> None:
    """Put a version's files, by one rename, where the origin that uses `data_dir` looks for them.

    Before them its torrent, and its blobs, which are linked or copied.
    """
    target = incoming_folder(data_dir, policy_version)
    if torrent is not None:
        await asyncio.to_thread(_stage_torrent, torrent, incoming_torrent(data_dir, policy_version))
    if delta is not None:
        await asyncio.to_thread(_stage_blob, delta, incoming_delta(data_dir, policy_version))
    if packed is not None:
        await asyncio.to_thread(_stage_blob, packed, incoming_packed(data_dir, policy_version))
    await asyncio.to_thread(_stage, source_dir, target, move)


async def announce(origin_url: str, envelope: SignedEnvelope) -> bool:
    """Tell the origin of a version whose files lie in its incoming folder; says whether it was new there.

    Raises VersionConflict if the number is taken, UserError if the origin refuses, OurFault if it can't be reached.
    """
    url = parse_source(origin_url) + "/v1/versions"
    timeout = aiohttp.ClientTimeout(total=ANNOUNCE_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(url, data=envelope_to_json(envelope), allow_redirects=False) as response,
        ):
            if response.status in (200, 201):
                return response.status == 201
            message = f"the origin at {origin_url} refuses the version ({response.status}): {await _error(response)}"
            if response.status == 409:
                raise VersionConflict(message)
            raise UserError(message) if response.status < 500 or response.status == 507 else OurFault(message)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = why_unreachable(error)
        raise OurFault(f"can't announce at {origin_url}: {reason}; start `shardcast origin` or try again") from error


async def next_version(origin_url: str) -> int:
    """The lowest number that was never used at this origin: what a resumed trainer publishes next.

    Raises OurFault if the origin can't be reached.
    """
    url = parse_source(origin_url) + "/healthz"
    timeout = aiohttp.ClientTimeout(total=ANNOUNCE_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
            response.raise_for_status()
            return int((await response.json())["next_version"])
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
        reason = why_unreachable(error)
        raise OurFault(f"can't ask {origin_url} for its versions: {reason}; start `shardcast origin`") from error


async def key_rotations(origin_url: str) -> list[SignedEnvelope]:
    """The statements that rotated the trainer's key, unchecked, as an origin keeps them. Raises OurFault."""
    url = parse_source(origin_url) + "/v1/keys"
    timeout = aiohttp.ClientTimeout(total=ANNOUNCE_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
            response.raise_for_status()
            return chain_from_json(await response.content.read(MAX_CHAIN_BYTES + 1))
    except (aiohttp.ClientError, TimeoutError, OSError, InvalidRotation) as error:
        reason = why_unreachable(error)
        raise OurFault(f"can't ask {origin_url} for rotations of the key: {reason}") from error


async def _error(response: aiohttp.ClientResponse) -> str:
    try:
        return str((await response.json())["error"])
    except (aiohttp.ClientError, ValueError, KeyError, TypeError):
        return response.reason or "no reason given"


def _shards_of(path: Path, index: int, size: int, shard_bytes: int, pieces: PieceHasher | None) -> Iterator[Shard]:
    with path.open("rb", buffering=0) as file:
        for offset in range(0, size, shard_bytes):
            length = min(shard_bytes, size - offset)
            yield Shard(index, offset, length, _hash(file, length, path, pieces))
    if pieces is not None:
        pieces.end_file()


def _hash(file: io.RawIOBase, length: int, path: Path, pieces: PieceHasher | None) -> Digest:
    digest = hashlib.sha256()
    left = length
    while left:
        chunk = file.read(min(left, MIB))
        if not chunk:
            raise UserError(f"{path} became shorter while it was read: write it whole before publishing")
        digest.update(chunk)
        if pieces is not None:
            pieces.update(chunk)
        left -= len(chunk)
    return Digest.from_raw(digest.digest())


def _incoming(data_dir: Path) -> Path:
    """Where the trainer puts things, made if need be. Raises UserError."""
    folder = incoming_folder(data_dir, 0).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"can't write to the origin's data directory: {error}") from None
    return folder


def _stage_torrent(torrent: bytes, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with disk_errors(target.parent):
            target.write_bytes(torrent)
    except OSError as error:
        raise UserError(f"can't write to the origin's data directory: {error}") from None


def _stage(source: Path, target: Path, move: bool) -> None:
    """Put the folder at `target` by one rename, replacing what an earlier attempt left there."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"can't write to the origin's data directory: {error}") from None
    with disk_errors(target.parent):
        staging = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
        try:
            _bring(source, staging / "files", move)
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(target)
            (staging / "files").rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _stage_blob(source: Path, target: Path) -> None:
    """A link, or a copy across file systems; in place by one rename, for the origin takes what it finds."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with disk_errors(target.parent):
        staging = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
        try:
            _link(source, staging / "blob")
            (staging / "blob").replace(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _bring(source: Path, target: Path, move: bool) -> None:
    if move:
        shutil.move(source, target)  # a rename, or a copy across file systems
        return
    for path, _ in list(list_files(source)):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        _link(source / path, target / path)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
