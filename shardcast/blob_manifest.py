"""A blob as if it were a version of one file, so that it is received, resumed and swapped like one.

Such a manifest is never signed and never leaves this process; the signed one vouches for its digests.
"""

from __future__ import annotations

from protocol.blob import BlobSection
from protocol.manifest import Manifest, ManifestFile, Shard

# Their names while they are received.
DELTA_FILE = "delta"
PACKED_FILE = "packed"


def delta_manifest(version: Manifest) -> Manifest:
    """The delta of a version that has one."""
    assert version.delta is not None
    return _manifest(version, version.delta, DELTA_FILE, None)


def packed_manifest(version: Manifest) -> Manifest:
    """The packed form of a version that has one. If a version has, this is what its info-hash stands for."""
    assert version.packed is not None
    return _manifest(version, version.packed, PACKED_FILE, version.torrent_info_hash)


def swapped(version: Manifest) -> Manifest:
    """What clients swap among themselves: the version packed if it is to be had so, else its files."""
    return version if version.packed is None else packed_manifest(version)


def _manifest(version: Manifest, section: BlobSection, name: str, info_hash: str | None) -> Manifest:
    return Manifest(
        run_id=version.run_id,
        policy_version=version.policy_version,
        files=(ManifestFile(name, section.size, section.digest),),
        shards=tuple(Shard(0, shard.offset, shard.size, shard.digest) for shard in section.shards),
        total_digest=section.digest,
        torrent_info_hash=info_hash,
    )
