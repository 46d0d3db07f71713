"""protocol.manifest: canonical bytes, strict validation, signatures, envelopes."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from protocol import manifest as m
from protocol.errors import BadSignature
from protocol.manifest import Digest, InvalidManifest, Manifest, ManifestFile, Shard
from protocol.signing import MANIFEST, RECEIPT, Identity

TRAINER = Identity.from_seed(b"t" * 32)
OTHER = Identity.from_seed(b"o" * 32)


def make_manifest(files: dict[str, list[bytes]] | None = None, **changes: Any) -> Manifest:
    """A manifest of files given as lists of shard contents."""
    files = files if files is not None else {"config.json": [b"{}"], "sub/model.safetensors": [b"aaaa", b"bb"]}
    listed, shards = [], []
    for index, (path, parts) in enumerate(files.items()):
        offset = 0
        for part in parts:
            shards.append(Shard(index, offset, len(part), Digest.of(part)))
            offset += len(part)
        listed.append(ManifestFile(path, offset, m.tree_digest(Digest.of(part) for part in parts)))
    fields: dict[str, Any] = {
        "run_id": "run-1",
        "policy_version": 3,
        "files": tuple(listed),
        "shards": tuple(shards),
        "total_digest": m.tree_digest(shard.digest for shard in shards),
    }
    return Manifest(**{**fields, **changes})


def edited(change: Any) -> bytes:
    """The payload of a good manifest after `change(body)`, in canonical form."""
    body = json.loads(make_manifest().to_json_bytes())
    change(body)
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def test_round_trip_gives_the_same_bytes_and_value() -> None:
    original = make_manifest()
    payload = original.to_json_bytes()
    assert Manifest.from_json_bytes(payload) == original
    assert Manifest.from_json_bytes(payload).to_json_bytes() == payload
    assert m.manifest_digest(payload) == "sha256:" + hashlib.sha256(payload).hexdigest()


def test_file_and_total_digests_are_over_the_shard_digests() -> None:
    manifest = make_manifest()
    raw = [hashlib.sha256(part).digest() for part in (b"{}", b"aaaa", b"bb")]
    assert manifest.files[1].digest.raw == hashlib.sha256(raw[1] + raw[2]).digest()
    assert manifest.total_digest.raw == hashlib.sha256(b"".join(raw)).digest()
    assert manifest.total_bytes == 8


def test_empty_files_have_no_shards() -> None:
    manifest = make_manifest({"empty": [], "full": [b"x"]})
    assert manifest.files[0].digest == Digest.of(b"")
    assert Manifest.from_json_bytes(manifest.to_json_bytes()) == manifest


@pytest.mark.parametrize(
    "text", ["", "sha256:", "sha256:" + "A" * 64, "sha256:" + "a" * 63, "sha1:" + "a" * 64, "sha256:" + "a" * 64 + "\n"]
)
def test_digest_refuses_other_forms(text: str) -> None:
    with pytest.raises(InvalidManifest, match="sha256:<64 hex"):
        Digest(text)


@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "a/../b",
        "/etc/passwd",
        "a//b",
        "a/./b",
        ".",
        "",
        "a\\b",
        "a\0b",
        "C:x",
        "a\nb",
        "x/",
        "é" * 600,
        "n" * 256,
    ],
)
def test_paths_that_could_leave_the_folder_are_refused(path: str) -> None:
    with pytest.raises(InvalidManifest, match="path"):
        make_manifest({path: [b"x"]})


@pytest.mark.parametrize("files", [{"a": [b"x"], "A": [b"y"]}, {"a": [b"x"], "a/b": [b"y"]}, {}])
def test_files_that_can_not_lie_beside_each_other_are_refused(files: dict[str, list[bytes]]) -> None:
    with pytest.raises(InvalidManifest):
        make_manifest(files)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b["shards"].pop(), "no shard covers"),
        (lambda b: b["shards"].append(b["shards"][-1]), "belongs to no file"),
        (lambda b: b["shards"].reverse(), "does not continue"),
        (lambda b: b["shards"][1].__setitem__(1, 1), "does not continue"),
        (lambda b: b["shards"][2].__setitem__(2, 3), "beyond the end"),
        (lambda b: b["shards"][2].__setitem__(2, 0), "size of shard"),
        (lambda b: b["shards"][0].__setitem__(2, m.MAX_SHARD_BYTES + 1), "size of shard"),
        (lambda b: b["shards"][0].__setitem__(3, Digest.of(b"other")), "does not follow"),
        (lambda b: b.__setitem__("total_digest", Digest.of(b"other")), "total digest"),
        (lambda b: b["files"][0].__setitem__("size", -1), "size of"),
        (lambda b: b["files"][0].__setitem__("size", True), "should be int"),
        (lambda b: b["files"][0].__setitem__("size", 2.0), "should be int"),
        (lambda b: b["files"][0].__setitem__("path", "../../etc/passwd"), "path"),
        (lambda b: b["shards"][0].append(1), "a shard reads"),
        (lambda b: b.__setitem__("format", 2), "update it"),
        (lambda b: b.__setitem__("policy_version", -1), "policy_version"),
        (lambda b: b.__setitem__("policy_version", 2**60), "policy_version"),
        (lambda b: b.__setitem__("run_id", "a/b"), "run id"),
        (lambda b: b.__setitem__("base_version", 1), "canonical"),
        (lambda b: b.pop("delta"), "lacks the field"),
        (lambda b: b.__setitem__("torrent_info_hash", "xyz"), "info_hash"),
        (lambda b: b.__setitem__("surprise", 1), "canonical"),
        (lambda b: b.pop("files"), "lacks the field"),
        (lambda b: b.__setitem__("files", {}), "should be list"),
    ],
)
def test_every_broken_rule_is_named(change: Any, message: str) -> None:
    with pytest.raises(InvalidManifest, match=message):
        Manifest.from_json_bytes(edited(change))


@pytest.mark.parametrize("payload", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000, b'{"format":1,"format":1}'])
def test_what_is_no_manifest_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidManifest):
        Manifest.from_json_bytes(payload)


def test_only_canonical_json_is_accepted() -> None:
    payload = make_manifest().to_json_bytes()
    for other in (payload + b"\n", payload.replace(b",", b", ", 1), json.dumps(json.loads(payload)).encode()):
        with pytest.raises(InvalidManifest, match="canonical"):
            Manifest.from_json_bytes(other)


def test_too_large_a_payload_is_not_parsed() -> None:
    with pytest.raises(InvalidManifest, match="at most"):
        Manifest.from_json_bytes(b" " * (m.MAX_PAYLOAD_BYTES + 1))


def test_only_a_pinned_key_opens_and_only_as_a_manifest() -> None:
    manifest = make_manifest()
    envelope = m.sign_manifest(manifest, TRAINER)
    assert m.open_manifest(envelope, {TRAINER.key_id}) == manifest
    with pytest.raises(BadSignature):
        m.open_manifest(envelope, {OTHER.key_id})
    with pytest.raises(BadSignature):
        m.open_manifest(TRAINER.sign(RECEIPT, envelope.payload), {TRAINER.key_id})
    forged = OTHER.sign(MANIFEST, envelope.payload)
    with pytest.raises(BadSignature):
        m.open_manifest(type(forged)(forged.payload, TRAINER.key_id, forged.signature), {TRAINER.key_id})


def test_envelope_json_round_trip() -> None:
    envelope = m.sign_manifest(make_manifest(), TRAINER)
    assert m.envelope_from_json(m.envelope_to_json(envelope)) == envelope


@pytest.mark.parametrize(
    "data",
    [
        b"{}",
        b"[]",
        b'{"payload":"!","key_id":"","signature":""}',
        b'{"payload":1,"key_id":"","signature":""}',
        b'{"payload":"","key_id":2,"signature":""}',
        b'{"payload":"","key_id":"","signature":"","more":1}',
        b"not json",
    ],
)
def test_broken_envelopes_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidManifest):
        m.envelope_from_json(data)


def test_an_oversize_envelope_is_refused() -> None:
    with pytest.raises(InvalidManifest, match="at most 10"):
        m.envelope_from_json(b" " * 11, max_bytes=10)
