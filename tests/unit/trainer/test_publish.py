from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import trainer.publish as publish_module
from protocol.errors import OurFault
from protocol.manifest import manifest_digest, open_manifest
from protocol.signing import SignedEnvelope
from shardcast.layout import incoming_delta, incoming_packed
from tests.factories import RUN_ID, TRAINER
from trainer.publish import Publisher, snapshot, write_version


class Tied(torch.nn.Module):
    """A model whose head is its embedding and is in no state dict of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 3)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.embed


class Places:
    """Coordinator and origin: who heard of a version, in which order."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, SignedEnvelope]] = []
        self.failures = 0

    async def announce(self, envelope: SignedEnvelope) -> int:
        self.heard.append(("coordinator", envelope))
        return 0

    async def announce_at_origin(self, url: str, envelope: SignedEnvelope) -> bool:
        if self.failures:
            self.failures -= 1
            raise OurFault("the origin is away")
        self.heard.append((url, envelope))
        return True


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "onnx").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json", "old.bin"):
        (folder / name).write_text(name)
    return folder


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Places:
    places = Places()
    monkeypatch.setattr(publish_module, "announce", places.announce_at_origin)
    return places


@pytest.fixture
def make_publisher(tmp_path: Path, model_folder: Path, places: Any) -> Callable[..., Publisher]:
    """Each is what a new process would make."""

    def make(run_id: str = RUN_ID) -> Publisher:
        return Publisher(
            places,
            TRAINER,
            run_id=run_id,
            model_folder=model_folder,
            origin="http://origin",
            origin_data=tmp_path / "origin",
            shard_bytes=1 << 16,
            full_every=3,
        )

    return make


@pytest.fixture
def publisher(make_publisher: Callable[..., Publisher]) -> Publisher:
    return make_publisher()


def state(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"lm_head.weight": torch.full((4, 3), value, dtype=torch.bfloat16)}


def test_a_snapshot_is_bf16_its_own_copy_and_has_a_head() -> None:
    model = Tied()
    taken = snapshot(model)
    assert set(taken) == {"embed.weight", "lm_head.weight"}
    assert {tensor.dtype for tensor in taken.values()} == {torch.bfloat16}
    before = taken["embed.weight"].clone()
    with torch.no_grad():
        model.embed.weight.add_(1.0)
    assert torch.equal(taken["embed.weight"], before)
    assert torch.equal(taken["lm_head.weight"], before)
    assert taken["lm_head.weight"].data_ptr() != taken["embed.weight"].data_ptr()


def test_a_versions_folder_is_whole_without_the_old_weights(tmp_path: Path, model_folder: Path) -> None:
    write_version(state(), model_folder, tmp_path / "version")
    assert {path.name for path in (tmp_path / "version").iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }
    assert torch.equal(
        load_file(tmp_path / "version" / "model.safetensors")["lm_head.weight"], state()["lm_head.weight"]
    )


async def test_the_coordinator_hears_of_a_version_before_the_origin(publisher: Publisher, places: Places) -> None:
    digest = await publisher.publish(state(), 3)
    (first, envelope), (second, again) = places.heard
    assert (first, second) == ("coordinator", "http://origin")
    assert envelope == again
    manifest = open_manifest(envelope, (TRAINER.key_id,))
    assert (manifest.run_id, manifest.policy_version) == (RUN_ID, 3)
    assert digest == manifest_digest(envelope.payload)


async def test_the_same_weights_are_the_same_version_again(publisher: Publisher) -> None:
    digest = await publisher.publish(state(), 0)
    assert await publisher.publish(state(), 0) == digest
    assert await publisher.digest_of(state(), 0) == digest
    assert await publisher.digest_of(state(2.0), 0) != digest
    assert await publisher.digest_of(state(), 1) != digest


async def test_an_origin_that_is_away_is_waited_for(
    publisher: Publisher, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coordinator.client import Backoff

    monkeypatch.setattr(publish_module, "Backoff", lambda: Backoff(0.001, 0.001))
    places.failures = 2
    await publisher.publish(state(), 0)
    assert [where for where, _ in places.heard] == ["coordinator", "http://origin"]


async def test_versions_go_out_one_after_the_other_in_the_background(publisher: Publisher, places: Places) -> None:
    for version in range(3):
        await publisher.begin(state(float(version)), version)
    await publisher.finish()
    await publisher.finish()
    versions = [open_manifest(envelope, (TRAINER.key_id,)).policy_version for _, envelope in places.heard]
    assert versions == [0, 0, 1, 1, 2, 2]


async def test_what_failed_in_the_background_is_raised(publisher: Publisher, places: Places) -> None:
    async def refuse(envelope: SignedEnvelope) -> int:
        raise OurFault("no")

    places.announce = refuse  # type: ignore[method-assign]
    await publisher.begin(state(), 0)
    with pytest.raises(OurFault, match="no"):
        await publisher.finish()
    await publisher.finish()


def large(value: int) -> dict[str, torch.Tensor]:
    """Weights of which a step changes a few."""
    weights = torch.ones(40_000, dtype=torch.bfloat16)
    weights[:value] = 2.0
    return {"lm_head.weight": weights.reshape(200, 200)}


def deltas(places: Places) -> list[int | None]:
    """The base of each version that the origin heard of."""
    manifests = [
        open_manifest(envelope, (TRAINER.key_id,)) for where, envelope in places.heard if where != "coordinator"
    ]
    return [None if manifest.delta is None else manifest.delta.base_version for manifest in manifests]


async def test_each_version_is_the_difference_to_the_one_before_but_for_keyframes(
    publisher: Publisher, places: Places, tmp_path: Path
) -> None:
    for version in range(5):
        await publisher.publish(large(version), version)
    assert deltas(places) == [None, 0, 1, None, 3]
    envelope = places.heard[-1][1]
    manifest = open_manifest(envelope, (TRAINER.key_id,))
    assert manifest.delta is not None and manifest.delta.size < manifest.total_bytes / 50
    assert incoming_delta(tmp_path / "origin", 4).stat().st_size == manifest.delta.size
    assert sorted(path.name for path in (tmp_path / "origin" / "published").iterdir()) == ["3", "4"]


async def test_weights_that_did_not_change_are_a_version_all_the_same(publisher: Publisher, places: Places) -> None:
    digests = {await publisher.publish(large(1), version) for version in range(3)}
    assert len(digests) == 3
    assert deltas(places) == [None, 0, 1]


async def test_a_difference_that_is_too_large_is_not_sent(publisher: Publisher, places: Places) -> None:
    for version in range(2):
        torch.manual_seed(version)
        await publisher.publish({"lm_head.weight": torch.randn(200, 200).bfloat16()}, version)
    assert deltas(places) == [None, None]


async def test_weights_are_published_packed_too_and_again_after_a_restart(
    make_publisher: Callable[[], Publisher], places: Places, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    weights = {"lm_head.weight": torch.randn(200, 200).bfloat16()}
    digest = await make_publisher().publish(weights, 0)
    manifest = open_manifest(places.heard[-1][1], (TRAINER.key_id,))
    assert manifest.packed is not None and manifest.packed.size < 0.75 * manifest.total_bytes
    blob = incoming_packed(tmp_path / "origin", 0)
    assert blob.stat().st_size == manifest.packed.size
    again = make_publisher()
    assert await again.digest_of(weights, 0) == digest == await again.publish(weights, 0)
    assert blob.stat().st_size == manifest.packed.size


async def test_after_a_restart_the_same_weights_have_the_same_digest(
    make_publisher: Callable[[], Publisher], places: Places, tmp_path: Path
) -> None:
    """Whether its base is still at hand, and the digest that the coordinator knows is that of a version with a delta."""
    first = make_publisher()
    digests = [await first.publish(large(version), version) for version in range(3)]
    assert deltas(places)[-1] == 1
    again = make_publisher()
    assert await again.digest_of(large(2), 2) == digests[2]
    shutil.rmtree(tmp_path / "origin" / "published" / "1")
    assert await again.digest_of(large(2), 2) == digests[2]
    assert await again.publish(large(2), 2) == digests[2]
    assert await again.digest_of(large(3), 2) != digests[2]


async def test_a_restarted_trainer_goes_on_from_what_it_published(
    make_publisher: Callable[[], Publisher], places: Places
) -> None:
    await make_publisher().publish(large(0), 0)
    await make_publisher().publish(large(1), 1)
    assert deltas(places) == [None, 0]


async def test_a_base_that_was_damaged_or_lost_since_is_no_base(
    make_publisher: Callable[[], Publisher], places: Places, tmp_path: Path
) -> None:
    await make_publisher().publish(large(0), 0)
    weights = tmp_path / "origin" / "published" / "0" / "files" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    await make_publisher().publish(large(1), 1)
    shutil.rmtree(tmp_path / "origin" / "published")
    await make_publisher().publish(large(2), 2)
    assert deltas(places) == [None, None, None]


async def test_another_runs_version_is_no_base(make_publisher: Callable[..., Publisher], places: Places) -> None:
    await make_publisher(run_id="another").publish(large(0), 0)
    await make_publisher().publish(large(1), 1)
    assert deltas(places) == [None, None]


async def test_nothing_is_left_of_the_scratch_folder(publisher: Publisher, tmp_path: Path) -> None:
    await asyncio.gather(publisher.publish(state(), 0), publisher.digest_of(state(), 1))
    assert list((tmp_path / "origin" / "scratch").iterdir()) == []
