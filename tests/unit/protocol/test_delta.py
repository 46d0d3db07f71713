"""protocol.delta: the section of a manifest that names a delta."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from protocol.blob import MAX_BLOB_SHARD_BYTES, BlobShard
from protocol.delta import CODEC_WORDS, DeltaSection
from protocol.manifest import Digest, InvalidManifest, Manifest, open_manifest, tree_digest
from tests.factories import TRAINER, make_version

PLAIN = open_manifest(make_version(3), {TRAINER.key_id})


def section() -> DeltaSection:
    digests = [Digest.of(b"one"), Digest.of(b"two")]
    shards = (BlobShard(0, 8, digests[0]), BlobShard(8, 3, digests[1]))
    return DeltaSection(CODEC_WORDS, 2, Digest.of(b"base"), 11, tree_digest(digests), shards)


def edited(change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The canonical bytes of a manifest whose section was changed."""
    body = json.loads(replace(PLAIN, delta=section()).to_json_bytes())
    change(body["delta"])
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def test_a_section_is_read_as_it_was_written_and_is_part_of_the_digest() -> None:
    manifest = replace(PLAIN, delta=section())
    payload = manifest.to_json_bytes()
    assert Manifest.from_json_bytes(payload) == manifest
    assert payload != PLAIN.to_json_bytes()
    assert json.loads(PLAIN.to_json_bytes())["delta"] is None


def test_a_codec_of_tomorrow_is_no_reason_to_refuse_the_version() -> None:
    payload = edited(lambda d: d.__setitem__("codec", "words-2"))
    delta = Manifest.from_json_bytes(payload).delta
    assert delta is not None and delta.codec == "words-2"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.__setitem__("codec", "Zip Bomb"), "codec"),
        (lambda d: d.__setitem__("codec", 1), "codec"),
        (lambda d: d.__setitem__("base_version", -1), "base_version"),
        (lambda d: d.__setitem__("base_version", 2.0), "base_version"),
        (lambda d: d.__setitem__("base_version", True), "base_version"),
        (lambda d: d.__setitem__("base_version", 3), "later base"),
        (lambda d: d.__setitem__("base_digest", "sha256:0"), "64 hex"),
        (lambda d: d.__setitem__("size", 12), "11 bytes"),
        (lambda d: d.__setitem__("digest", Digest.of(b"x")), "does not follow"),
        (lambda d: d.__setitem__("shards", {}), "list"),
        (lambda d: d.__setitem__("shards", []), "1 to"),
        (lambda d: d["shards"].reverse(), "does not continue"),
        (lambda d: d["shards"][1].__setitem__(0, 9), "does not continue"),
        (lambda d: d["shards"][0].__setitem__(1, 0), "size of shard"),
        (lambda d: d["shards"][0].__setitem__(1, MAX_BLOB_SHARD_BYTES + 1), "size of shard"),
        (lambda d: d["shards"][0].append(1), "reads"),
        (lambda d: d["shards"].__setitem__(0, "abc"), "reads"),
        (lambda d: d["shards"].__setitem__(0, [0, "8", Digest.of(b"one")]), "should be int"),
        (lambda d: d.pop("size"), "exactly the fields"),
        (lambda d: d.__setitem__("more", 1), "exactly the fields"),
    ],
)
def test_every_broken_rule_is_named(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(InvalidManifest, match=message):
        Manifest.from_json_bytes(edited(change))


@pytest.mark.parametrize("value", [[], "x", 1, False, [["codec", "words-1"]]])
def test_what_is_no_section_is_refused(value: object) -> None:
    body = json.loads(PLAIN.to_json_bytes())
    body["delta"] = value
    with pytest.raises(InvalidManifest):
        Manifest.from_json_bytes(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
