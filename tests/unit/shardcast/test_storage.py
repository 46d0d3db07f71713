"""shardcast.storage and shardcast.partial: what is on disk, and that nothing half-done shows."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.blob import BlobShard
from protocol.delta import CODEC_WORDS, DeltaSection
from protocol.errors import UserError
from protocol.manifest import Digest, Manifest, SignedEnvelope, manifest_digest, sign_manifest, tree_digest
from protocol.signing import Identity
from shardcast.collectable import collectable
from shardcast.data_dir import serve_alone
from shardcast.layout import delta_folder_name, incoming_delta, incoming_folder, version_name
from shardcast.names import VersionConflict, VersionNames
from shardcast.partial import DiskFullError, PartialVersion, hash_range
from shardcast.publish import build_manifest
from shardcast.storage import StoredVersion, VersionStore

TRAINER = Identity.from_seed(b"t" * 32)
KEYS = {TRAINER.key_id}


def make_version(root: Path, version: int, content: bytes | None = None) -> tuple[Manifest, SignedEnvelope, Path]:
    """A signed version in a folder below `root`: one file in shards of 4 bytes, one that never changes."""
    folder = incoming_folder(root, version)
    (folder / "sub").mkdir(parents=True)
    (folder / "model.bin").write_bytes(content if content is not None else b"version %06d" % version)
    (folder / "sub" / "config.json").write_bytes(b"{}")
    manifest = build_manifest(folder, run_id="r", policy_version=version, shard_bytes=4)
    return manifest, sign_manifest(manifest, TRAINER), folder


def add(store: VersionStore, version: int) -> StoredVersion:
    manifest, envelope, folder = make_version(store.root, version)
    return store.adopt(folder, envelope, manifest)


def fill(partial: PartialVersion, source: Path, indexes: list[int]) -> None:
    for index in indexes:
        shard = partial.manifest.shards[index]
        data = (source / partial.manifest.files[shard.file].path).read_bytes()
        with partial.writer(index) as writer:
            writer.write([data[shard.offset : shard.offset + shard.size]])
            assert partial.commit(index, writer.digest)


def test_an_adopted_version_is_visible_located_and_survives_a_restart(tmp_path: Path) -> None:
    stored = add(VersionStore(tmp_path, KEYS), 3)
    store = VersionStore(tmp_path, KEYS)
    assert store.versions == [3] and store.head is not None and store.head.digest == stored.digest
    shard = stored.manifest.shards[1]
    location = store.locate(shard.digest)
    assert location is not None and hash_range(location.path, location.offset, location.size) == shard.digest
    assert stored.path.name == f"3-{stored.digest.short}"
    assert not incoming_folder(tmp_path, 3).exists()


def test_a_version_of_another_key_is_not_here(tmp_path: Path) -> None:
    add(VersionStore(tmp_path, KEYS), 0)
    assert VersionStore(tmp_path, {Identity.from_seed(b"x" * 32).key_id}).versions == []


def test_a_number_names_one_digest_for_ever_also_after_collection(tmp_path: Path) -> None:
    store = VersionStore(tmp_path, KEYS)
    add(store, 1)
    store.remove([1])
    assert store.versions == [] and store.names.latest == 1
    manifest, envelope, folder = make_version(tmp_path, 1, b"other content")
    for each in (store, VersionStore(tmp_path, KEYS)):
        with pytest.raises(VersionConflict, match="for ever"):
            each.adopt(folder, envelope, manifest)
        with pytest.raises(VersionConflict, match="for ever"):
            each.open_partial(envelope, manifest)
    assert store.versions == []


@pytest.mark.parametrize("damage", ["missing", "short", "surplus", "link"])
def test_a_folder_that_differs_from_its_manifest_is_refused(tmp_path: Path, damage: str) -> None:
    store = VersionStore(tmp_path / "store", KEYS)
    manifest, envelope, folder = make_version(store.root, 1)
    model = folder / "model.bin"
    if damage == "missing":
        model.unlink()
    elif damage == "short":
        os.truncate(model, 3)
    elif damage == "surplus":
        (folder / "extra").write_bytes(b"")
    else:
        model.unlink()
        model.symlink_to("/etc/hostname")
    with pytest.raises(UserError):
        store.adopt(folder, envelope, manifest)
    assert store.versions == [] and VersionStore(tmp_path / "store", KEYS).names.latest is None


def test_a_partial_version_is_invisible_until_it_is_finished(tmp_path: Path) -> None:
    manifest, envelope, source = make_version(tmp_path / "from", 2)
    store = VersionStore(tmp_path / "to", KEYS)
    partial = store.open_partial(envelope, manifest)
    fill(partial, source, partial.missing)
    assert store.versions == [] and not list((store.root / "versions").iterdir())
    stored = store.finish(partial)
    assert (stored.path / "model.bin").read_bytes() == (source / "model.bin").read_bytes()
    assert (stored.path / "sub" / "config.json").read_bytes() == b"{}"
    assert not list((store.root / "partial").iterdir())
    assert VersionStore(tmp_path / "to", KEYS).versions == [2]


def test_resume_trusts_only_what_still_hashes_right(tmp_path: Path) -> None:
    manifest, envelope, source = make_version(tmp_path / "from", 2)
    first = VersionStore(tmp_path / "to", KEYS).open_partial(envelope, manifest)
    fill(first, source, [0, 1, 2])
    first.close()
    with (first.folder / "model.bin").open("r+b") as file:
        file.seek(4)
        file.write(b"?")  # shard 1 was lost, as after a power cut
    with first.folder.with_name(first.folder.name + ".journal").open("ab") as journal:
        journal.write(b"99999\nrubbish\n3")  # out of range, unreadable, torn
    resumed = VersionStore(tmp_path / "to", KEYS).open_partial(envelope, manifest)
    assert sorted(resumed.have) == [0, 2]
    assert resumed.done_bytes == 8
    resumed.close()


def test_a_wrong_shard_is_not_committed(tmp_path: Path) -> None:
    manifest, envelope, _ = make_version(tmp_path / "from", 2)
    partial = VersionStore(tmp_path / "to", KEYS).open_partial(envelope, manifest)
    with partial.writer(0) as writer:
        writer.write([b"evil"])
        assert not partial.commit(0, writer.digest)
    assert 0 in partial.missing
    partial.close()


def test_a_full_disk_is_said_and_leaves_nothing_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, envelope, _ = make_version(tmp_path / "from", 2)
    store = VersionStore(tmp_path / "to", KEYS)

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFullError, match=r"can't take version \d+ of \d+\.\d MiB: make room"):
        store.open_partial(envelope, manifest)
    assert store.versions == [] and store.names.latest is None


@pytest.mark.parametrize("lost", [False, True])
def test_what_was_not_flushed_is_hashed_again_after_the_machine_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    manifest, envelope, source = make_version(tmp_path / "from", 2)
    store = VersionStore(tmp_path / "to", KEYS, durable=False)
    partial = store.open_partial(envelope, manifest)
    fill(partial, source, partial.missing)
    model = store.finish(partial).path / "model.bin"
    assert VersionStore(tmp_path / "to", KEYS).versions == [2]
    if lost:
        model.write_bytes(bytes(model.stat().st_size))
    assert VersionStore(tmp_path / "to", KEYS).versions == [2]  # within one boot nothing can be lost: not hashed
    monkeypatch.setattr("shardcast.unflushed.boot_id", lambda: "the next boot")
    assert VersionStore(tmp_path / "to", KEYS).versions == ([] if lost else [2])


def test_a_crash_between_rename_and_name_is_repaired_at_the_next_start(tmp_path: Path) -> None:
    stored = add(VersionStore(tmp_path, KEYS), 4)
    (tmp_path / "names").unlink()
    assert VersionStore(tmp_path, KEYS).names.get(4) == stored.digest


def test_a_damaged_version_is_left_out_and_can_be_replaced(tmp_path: Path) -> None:
    stored = add(VersionStore(tmp_path, KEYS), 4)
    os.truncate(stored.path / "model.bin", 1)
    store = VersionStore(tmp_path, KEYS)
    assert store.versions == []
    assert add(store, 4).digest == stored.digest
    assert (stored.path / "model.bin").stat().st_size == 14


@pytest.mark.parametrize(
    ("reading", "required", "keep", "gone"),
    [
        ([], [], 1, [0, 1, 2, 3]),
        ([], [], 2, [0, 1, 2]),
        ([1], [], 1, [0, 2, 3]),
        ([], [2, 77], 1, [0, 1, 3]),
        ([], [], 0, [0, 1, 2, 3]),
        ([], [], 9, []),
    ],
)
def test_what_may_be_collected(reading: list[int], required: list[int], keep: int, gone: list[int]) -> None:
    assert collectable([0, 1, 2, 3, 4], reading=reading, required=required, keep_last=keep) == gone


def test_collection_spares_what_is_read_and_shared_shards_stay_located(tmp_path: Path) -> None:
    store = VersionStore(tmp_path, KEYS)
    versions = [add(store, number) for number in range(4)]
    config = versions[0].manifest.shards[-1].digest
    with store.reading(1):
        assert store.collect(required=(), keep_last=1) == [0, 2]
    assert store.collect(required=(), keep_last=1) == [1]
    assert store.versions == [3]
    location = store.locate(config)
    assert location is not None and location.version == 3 and location.path.exists()


def test_collection_removes_stale_partials_but_not_one_being_filled(tmp_path: Path) -> None:
    store = VersionStore(tmp_path / "to", KEYS)
    made = {number: make_version(tmp_path / "from", number) for number in (1, 2)}
    for manifest, envelope, _ in made.values():
        partial = store.open_partial(envelope, manifest)
        partial.close()
        (store.root / "partial" / delta_folder_name(partial.folder.name, 1)).mkdir()  # a delta received for it
    add(store, 5)
    manifest, envelope, _ = made[2]

    async def collect_while_filled() -> None:
        async with store.lock(2, manifest_digest(envelope.payload)):
            store.collect(required=(), keep_last=1)

    asyncio.run(collect_while_filled())
    left = {path.name.split("-")[0] for path in (store.root / "partial").iterdir()}
    assert left == {"2"}


def test_a_delta_comes_and_goes_with_its_version(tmp_path: Path) -> None:
    store = VersionStore(tmp_path, KEYS)
    add(store, 1)
    manifest, _, folder = make_version(tmp_path, 2)
    blob = b"the difference to version 1"
    shard = BlobShard(0, len(blob), Digest.of(blob))
    section = DeltaSection(CODEC_WORDS, 1, Digest.of(b"version 1"), len(blob), tree_digest([shard.digest]), (shard,))
    manifest = replace(manifest, delta=section)
    envelope = sign_manifest(manifest, TRAINER)
    with pytest.raises(UserError, match="absent"):
        store.adopt(folder, envelope, manifest)
    incoming_delta(tmp_path, 2).write_bytes(blob)
    store.adopt(folder, envelope, manifest)
    again = VersionStore(tmp_path, KEYS)
    assert again.versions == [1, 2]
    location = again.locate(shard.digest)
    assert location is not None and location.version == 2 and location.path.read_bytes() == blob
    assert again.holds(section.digest)
    again.remove([2])
    assert again.locate(shard.digest) is None and not location.path.exists()


def test_an_origin_that_ended_between_delta_and_files_takes_both_again(tmp_path: Path) -> None:
    manifest, _, folder = make_version(tmp_path, 2)
    blob = b"the difference to version 1"
    shard = BlobShard(0, len(blob), Digest.of(blob))
    section = DeltaSection(CODEC_WORDS, 1, Digest.of(b"version 1"), len(blob), tree_digest([shard.digest]), (shard,))
    manifest = replace(manifest, delta=section)
    envelope = sign_manifest(manifest, TRAINER)
    name = version_name(2, manifest_digest(envelope.payload))
    (tmp_path / "deltas").mkdir()
    (tmp_path / "deltas" / name).write_bytes(blob)
    (tmp_path / "deltas" / "3-0123456789abcdef").write_bytes(blob)
    store = VersionStore(tmp_path, KEYS)
    assert [path.name for path in (tmp_path / "deltas").iterdir()] == [name]
    store.adopt(folder, envelope, manifest)
    assert store.holds(section.digest)


def test_refresh_sees_what_other_processes_did(tmp_path: Path) -> None:
    ours, theirs = VersionStore(tmp_path, KEYS), VersionStore(tmp_path, KEYS)
    stored = add(theirs, 1)
    assert ours.versions == []
    ours.refresh()
    assert ours.versions == [1] and ours.names.get(1) == stored.digest
    shutil.rmtree(stored.path)
    ours.refresh()
    assert ours.versions == []


async def test_the_lock_of_a_version_is_held_by_one_task(tmp_path: Path) -> None:
    store = VersionStore(tmp_path, KEYS)
    digest = add(store, 1).digest
    order: list[str] = []
    entered, leave = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        async with store.lock(1, digest):
            entered.set()
            await leave.wait()
            order.append("first")

    async def second() -> None:
        await entered.wait()
        leave.set()
        async with store.lock(1, digest):
            order.append("second")

    async with asyncio.timeout(10):
        await asyncio.gather(first(), second())
    assert order == ["first", "second"]


def test_two_servers_can_not_share_a_data_directory(tmp_path: Path) -> None:
    with serve_alone(tmp_path), pytest.raises(UserError, match="--data-dir"), serve_alone(tmp_path):
        raise AssertionError("the second server started")
    with serve_alone(tmp_path):
        assert (tmp_path / "versions").is_dir()


def test_a_data_directory_that_can_not_be_made_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="data directory"):
        VersionStore(tmp_path / "file" / "below", KEYS)


def test_a_torn_line_names_nothing_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    stored = add(VersionStore(tmp_path / "s", KEYS), 0)
    path = tmp_path / "names"
    path.write_text(f"1 {stored.digest}\n2 sha256:ab")
    names = VersionNames(path)
    assert (names.get(1), names.get(2), names.latest) == (stored.digest, None, 1)
    names.record(3, stored.digest)
    again = VersionNames(path)
    assert (again.get(2), again.get(3)) == (None, stored.digest)
