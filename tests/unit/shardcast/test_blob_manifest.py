"""shardcast.blob_manifest: blobs are received and swapped like versions of one file."""

from __future__ import annotations

from shardcast.blob_manifest import delta_manifest, packed_manifest, swapped
from tests.unit.shardcast.test_ways import V, packed


def test_a_blob_is_received_like_a_version_of_one_file() -> None:
    blob = delta_manifest(V[1])
    assert V[1].delta is not None
    assert (blob.policy_version, blob.total_bytes, blob.total_digest) == (1, 10, V[1].delta.digest)
    assert blob.torrent_info_hash is None


def test_what_is_swapped_is_the_packed_form_if_there_is_one() -> None:
    assert swapped(V[0]) is V[0]
    target = packed(V[0], 600)
    assert swapped(target) == packed_manifest(target)
    assert (swapped(target).total_bytes, swapped(target).torrent_info_hash) == (600, "0" * 40)
