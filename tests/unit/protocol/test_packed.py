"""protocol.packed: the section of a manifest that names its files packed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from protocol.blob import BlobShard
from protocol.digest import Digest, InvalidManifest, tree_digest
from protocol.manifest import Manifest
from protocol.packed import CODEC_PLANES, PackedSection
from tests.unit.protocol.test_delta import PLAIN


def section() -> PackedSection:
    digests = [Digest.of(b"one"), Digest.of(b"two")]
    shards = (BlobShard(0, 8, digests[0]), BlobShard(8, 3, digests[1]))
    return PackedSection(CODEC_PLANES, 11, tree_digest(digests), shards)


def edited(change: Callable[[dict[str, Any]], Any]) -> bytes:
    body = json.loads(replace(PLAIN, packed=section()).to_json_bytes())
    change(body["packed"])
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def test_a_section_is_read_as_it_was_written_and_weighs_what_a_server_keeps_of_it() -> None:
    manifest = replace(PLAIN, packed=section())
    assert Manifest.from_json_bytes(manifest.to_json_bytes()) == manifest
    assert manifest.kept_bytes == PLAIN.kept_bytes + 11


def test_a_manifest_without_one_reads_as_before_there_were_any() -> None:
    assert "packed" not in json.loads(PLAIN.to_json_bytes())


def test_a_codec_of_tomorrow_is_no_reason_to_refuse_the_version() -> None:
    packed = Manifest.from_json_bytes(edited(lambda p: p.__setitem__("codec", "planes-2"))).packed
    assert packed is not None and packed.codec == "planes-2"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.__setitem__("codec", "Zip Bomb"), "codec"),
        (lambda p: p.__setitem__("codec", 1), "codec"),
        (lambda p: p.__setitem__("size", 12), "11 bytes"),
        (lambda p: p.__setitem__("digest", Digest.of(b"x")), "does not follow"),
        (lambda p: p.__setitem__("shards", {}), "list"),
        (lambda p: p.__setitem__("shards", []), "1 to"),
        (lambda p: p["shards"].reverse(), "does not continue"),
        (lambda p: p["shards"][0].__setitem__(1, 0), "size of shard"),
        (lambda p: p.__setitem__("base_version", 1), "exactly the fields"),
        (lambda p: p.pop("size"), "exactly the fields"),
    ],
)
def test_every_broken_rule_is_named(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(InvalidManifest, match=message):
        Manifest.from_json_bytes(edited(change))


@pytest.mark.parametrize("value", [None, [], "x", 1, False])
def test_what_is_no_section_is_refused(value: object) -> None:
    body = json.loads(PLAIN.to_json_bytes())
    body["packed"] = value
    with pytest.raises(InvalidManifest):
        Manifest.from_json_bytes(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
