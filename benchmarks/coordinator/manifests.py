"""Versions as the simulated trainer announces them: every process makes the same manifest from run and number alone."""

from __future__ import annotations

from functools import lru_cache

from benchmarks.coordinator.setting import TRAINER
from protocol.manifest import Digest, Manifest, ManifestFile, Shard, manifest_digest, sign_manifest, tree_digest
from protocol.signing import SignedEnvelope


def manifest(run_id: str, version: int) -> SignedEnvelope:
    """A signed manifest of one small file."""
    data = f"weights {version}".encode()
    shard = Shard(0, 0, len(data), Digest.of(data))
    tree = tree_digest([shard.digest])
    file = ManifestFile("model.safetensors", len(data), tree)
    return sign_manifest(Manifest(run_id, version, (file,), (shard,), tree), TRAINER)


@lru_cache(maxsize=4096)
def digest(run_id: str, version: int) -> str:
    """The digest that spans of this version name."""
    return str(manifest_digest(manifest(run_id, version).payload))
