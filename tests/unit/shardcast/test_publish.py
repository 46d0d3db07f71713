"""shardcast.publish: one folder, one manifest."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.errors import OurFault, UserError
from protocol.manifest import manifest_digest, sign_manifest
from protocol.signing import Identity
from shardcast.layout import incoming_delta
from shardcast.publish import _stage, announce, build_manifest, make_delta, stage


def test_shards_are_the_byte_ranges_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(bytes(range(10)))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "empty").write_bytes(b"")
    manifest = build_manifest(tmp_path, run_id="r", policy_version=1, shard_bytes=4)
    assert [(file.path, file.size) for file in manifest.files] == [("a/empty", 0), ("b", 10)]
    assert [(shard.file, shard.offset, shard.size) for shard in manifest.shards] == [(1, 0, 4), (1, 4, 4), (1, 8, 2)]
    assert manifest.shards[2].digest.hex == hashlib.sha256(b"\x08\x09").hexdigest()


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    first, second = (build_manifest(tmp_path, run_id="r", policy_version=1) for _ in range(2))
    assert first.to_json_bytes() == second.to_json_bytes()


def test_folders_that_can_not_be_a_version_are_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1 to"):
        build_manifest(tmp_path, run_id="r", policy_version=1)
    with pytest.raises(UserError, match="not a folder"):
        build_manifest(tmp_path / "absent", run_id="r", policy_version=1)
    (tmp_path / "link").symlink_to("/etc/hostname")
    with pytest.raises(UserError, match="link"):
        build_manifest(tmp_path, run_id="r", policy_version=1)


@pytest.mark.parametrize("move", [True, False])
def test_staging_replaces_what_an_earlier_attempt_left(tmp_path: Path, move: bool) -> None:
    source, target = tmp_path / "source", tmp_path / "incoming" / "7"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "f").write_bytes(b"new")
    target.mkdir(parents=True)
    (target / "old").write_bytes(b"")
    _stage(source, target, move)
    assert [path.relative_to(target).as_posix() for path in target.rglob("*")] == ["sub", "sub/f"]
    assert source.exists() is not move
    assert [path.name for path in target.parent.iterdir()] == ["7"]


def test_a_delta_goes_into_the_manifest_if_it_is_worth_it(tmp_path: Path) -> None:
    old, new, blob = tmp_path / "old", tmp_path / "new", tmp_path / "blob"
    for folder, data in ((old, bytes(10_000)), (new, bytes(9_999) + b"x")):
        folder.mkdir()
        (folder / "w").write_bytes(data)
    base, manifest = (build_manifest(each, run_id="r", policy_version=i) for i, each in enumerate((old, new), 3))
    made = make_delta(old, base, new, manifest, blob)
    assert made is not None and made.delta is not None
    assert (made.delta.base_version, made.delta.base_digest) == (3, manifest_digest(base.to_json_bytes()))
    assert made.delta.size == blob.stat().st_size
    assert replace(made, delta=None) == manifest
    assert make_delta(old, base, new, manifest, blob, most=0.001) is None
    assert not blob.exists()


async def test_a_staged_delta_replaces_what_an_earlier_attempt_left(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "w").write_bytes(b"w")
    for data in (b"first", b"second"):
        (tmp_path / "blob").write_bytes(data)
        await stage(tmp_path / "files", tmp_path / "data", 4, move=False, delta=tmp_path / "blob")
        (tmp_path / "blob").unlink()
    assert incoming_delta(tmp_path / "data", 4).read_bytes() == b"second"
    assert sorted(path.name for path in (tmp_path / "data" / "incoming").iterdir()) == ["4", "4.delta"]


async def test_an_origin_that_is_down_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    envelope = sign_manifest(build_manifest(tmp_path, run_id="r", policy_version=1), Identity.from_seed(b"t" * 32))
    with pytest.raises(OurFault, match="start `shardcast origin`"):
        await announce("http://127.0.0.1:9", envelope)
