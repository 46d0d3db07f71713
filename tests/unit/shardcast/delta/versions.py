"""Versions in folders for tests of deltas: safetensors written by hand, so that every layout can be had."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from protocol.manifest import Manifest, manifest_digest
from shardcast.delta.decode import DeltaView
from shardcast.delta.encode import delta_section, encode_delta
from shardcast.delta.views import FolderView
from shardcast.publish import build_manifest

SHARD = 4096
Tensors = Mapping[str, tuple[str, bytes]]


def safetensors(tensors: Tensors, pad: int = 8) -> bytes:
    """A file of these tensors (dtype and bytes by name), one after the other in the given order."""
    entries, at = {}, 0
    for name, (dtype, data) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % pad)
    return struct.pack("<Q", len(header)) + header + b"".join(data for _, data in tensors.values())


def words(count: int, seed: int = 0) -> np.ndarray:
    """Weights as bfloat16 bit patterns: normal numbers of standard deviation 0.05."""
    values = np.random.default_rng(seed).normal(0, 0.05, count).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def step(old: np.ndarray, share: float, seed: int = 0) -> np.ndarray:
    """Words of which a share moved by a few units in the last place."""
    random = np.random.default_rng(seed)
    places = random.choice(len(old), int(share * len(old)), replace=False)
    new = old.copy()
    new[places] += random.integers(1, 4, len(places)).astype(np.uint16)
    return new


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def manifest(folder: Path, version: int, shard: int = SHARD) -> Manifest:
    return build_manifest(folder, run_id="run", policy_version=version, shard_bytes=shard)


def make_blob(
    base: Path, target: Path, path: Path, *, shard: int = SHARD, threads: int = 1, span: int = SHARD
) -> bytes:
    """The delta from one folder to another, also left at `path`."""
    old, new = manifest(base, 1, shard), manifest(target, 2, shard)
    with FolderView(base, old.files) as before, FolderView(target, new.files) as after:
        encode_delta(before, after, new, path, limit=10**9, threads=threads, span=span)
    section = delta_section(path, 1, manifest_digest(old.to_json_bytes()), shard)
    assert section.size == path.stat().st_size
    return path.read_bytes()


def apply(base: Path, blob: bytes, target: Manifest, shard: int = SHARD) -> dict[str, bytes]:
    """The target's files as the blob makes them, read shard by shard."""
    with FolderView(base, manifest(base, 1, shard).files) as before:
        view = DeltaView(before, target, lambda offset, count: blob[offset : offset + count], len(blob))
        return read_all(view, target)


def read_all(view: DeltaView, target: Manifest) -> dict[str, bytes]:
    made = {file.path: bytearray(file.size) for file in target.files}
    for each in target.shards:
        out = np.empty(each.size, np.uint8)
        view.read(each.file, each.offset, out)
        made[target.files[each.file].path][each.offset : each.offset + each.size] = out.tobytes()
    return {path: bytes(data) for path, data in made.items()}
