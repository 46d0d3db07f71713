"""shardcast.making: what can be made of a blob of which only some shards are here."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from protocol.blob import BlobShard
from protocol.digest import Digest, tree_digest
from protocol.manifest import Manifest, manifest_digest, sign_manifest
from protocol.packed import CODEC_PLANES, PackedSection
from protocol.signing import Identity
from shardcast.blob_in import BlobIn
from shardcast.blob_manifest import packed_manifest
from shardcast.delta.apply import Applier
from shardcast.delta.decode import DeltaView
from shardcast.delta.encode import encode_packed
from shardcast.delta.errors import NotHereYetError
from shardcast.delta.views import FolderView
from shardcast.making import Making, Waiting
from shardcast.partial import PartialVersion
from tests.unit.shardcast.delta.versions import manifest, safetensors, words, write

TRAINER = Identity.from_seed(b"t" * 32)
BLOB_SHARD = 3000


def test_a_thing_is_free_with_its_last_shard() -> None:
    waiting = Waiting([range(0, 1), range(0, 3), range(2, 3), range(3, 4)], have=[0])
    assert waiting.free == [0]
    assert waiting.arrived(2) == [2]
    assert waiting.arrived(1) == [1]
    assert waiting.arrived(3) == [3]
    assert waiting.arrived(3) == []


class Packed:
    """A version of two tied tensors, its blob on its way in, and the target that is made of it."""

    def __init__(self, root: Path) -> None:
        weights = words(20_000).tobytes()
        tensors = {"a": ("BF16", weights), "b": ("BF16", words(8000, seed=2).tobytes()), "tied": ("BF16", weights)}
        folder = write(root / "v", {"model.safetensors": safetensors(tensors)})
        plain = manifest(folder, 0)
        encode_packed(folder, plain, root / "blob", limit=10**9)
        self.data = (root / "blob").read_bytes()
        parts = [self.data[at : at + BLOB_SHARD] for at in range(0, len(self.data), BLOB_SHARD)]
        shards = tuple(BlobShard(BLOB_SHARD * i, len(part), Digest.of(part)) for i, part in enumerate(parts))
        digest = tree_digest(shard.digest for shard in shards)
        section = PackedSection(CODEC_PLANES, len(self.data), digest, shards)
        self.manifest = Manifest("run", 0, plain.files, plain.shards, plain.total_digest, None, None, section)
        self.blob = BlobIn(self._opened(root / "blob.in", packed_manifest(self.manifest)))
        self.target = self._opened(root / "target", self.manifest)
        self.nothing = FolderView(root, ())

    def _opened(self, folder: Path, described: Manifest) -> PartialVersion:
        envelope = sign_manifest(self.manifest, TRAINER)
        partial = PartialVersion(folder, envelope, described, manifest_digest(envelope.payload))
        partial.open()
        return partial

    def arrive(self, index: int) -> None:
        with self.blob.partial.writer(index) as writer:
            writer.write([self.data[BLOB_SHARD * index : BLOB_SHARD * (index + 1)]])
            assert self.blob.partial.commit(index, writer.digest)
        self.blob.on_shard(index)

    def close(self) -> None:
        self.blob.partial.close()
        self.target.close()


@pytest.fixture
def packed(tmp_path: Path) -> Packed:
    return Packed(tmp_path)


@pytest.mark.parametrize("order", ["forward", "backward"])
async def test_shards_are_made_as_the_blob_comes_and_tied_ones_at_the_latest_with_its_end(
    packed: Packed, order: str
) -> None:
    count = len(packed.blob.partial.manifest.shards)
    packed.arrive(0)
    made = threading.Event()
    indexes = range(1, count) if order == "forward" else range(count - 1, 0, -1)
    with packed.blob.open() as file:
        view = DeltaView(packed.nothing, packed.manifest, file.read, file.size)
        applier = Applier(packed.target, view, on_shard=lambda index: made.set())
        making = asyncio.create_task(Making(applier, view, packed.blob).run(2))
        for index in indexes[:-1]:
            packed.arrive(index)
        async with asyncio.timeout(20):
            assert await asyncio.to_thread(made.wait, 20)
            assert packed.target.missing
            packed.arrive(indexes[-1])
            applied = await making
    assert (applied.wrong, applied.fault, packed.target.missing) == (0, None, [])
    packed.close()


def test_what_is_not_here_is_not_read(packed: Packed) -> None:
    packed.arrive(1)
    with packed.blob.open() as file:
        assert file.read(BLOB_SHARD, 10) == packed.data[BLOB_SHARD : BLOB_SHARD + 10]
        for offset, size in ((0, 1), (BLOB_SHARD - 1, 2), (2 * BLOB_SHARD - 1, 2)):
            with pytest.raises(NotHereYetError):
                file.read(offset, size)
    assert packed.blob.shards_at(BLOB_SHARD - 1, 2) == range(0, 2)
    assert packed.blob.shards_at(BLOB_SHARD, BLOB_SHARD) == range(1, 2)
    packed.close()
