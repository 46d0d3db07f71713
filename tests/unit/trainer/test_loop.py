"""The trainer's loop on a tiny model, against a coordinator and an origin in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import trainer.publish as publish_module
from coordinator.client import RunState
from protocol.errors import OurFault, UserError
from protocol.manifest import manifest_digest, open_manifest
from protocol.rollout import RolloutGroup, VerifiedRollout
from protocol.signing import SignedEnvelope
from tests.factories import RUN_ID, TRAINER, make_rollout, make_tokens
from tests.tiny_model import build_tiny_model
from trainer.config import TrainerConfig, TrainerRun
from trainer.loop import Trainer
from trainer.rollback import go_back, newest_up_to


class Coordinator:
    """Serves the same batch again until it is acknowledged, and remembers everything in order."""

    def __init__(self) -> None:
        self.versions: list[str] = []
        self.acknowledged = -1
        self.log: list[tuple[str, int]] = []
        self.reports: dict[int, dict[str, float]] = {}
        self.steps: dict[int, tuple[int, int]] = {}
        self.alarms: dict[int, set[str]] = {}
        self.fail_report_of = -1
        self.kept: int | None = None  # the newest version not withdrawn, until another is announced
        self.stop_at_pull: tuple[int, asyncio.Event] | None = None

    async def state(self) -> RunState:
        head = len(self.versions) - 1 if self.kept is None else self.kept
        return RunState(
            run_id=RUN_ID,
            head_version=head if self.versions else None,
            head_digest=self.versions[-1] if self.versions else "",
            next_batch=self.acknowledged + 1,
            temperature=1.0,
            max_staleness=1,
            groups_per_batch=2,
        )

    async def announce(self, envelope: SignedEnvelope) -> int:
        manifest = open_manifest(envelope, (TRAINER.key_id,))
        digest = str(manifest_digest(envelope.payload))
        if manifest.policy_version < len(self.versions):
            assert self.versions[manifest.policy_version] == digest, "a number names one digest for ever"
        else:
            assert manifest.policy_version == len(self.versions), "no gap"
            self.versions.append(digest)
            self.kept = None
        self.log.append(("announce", manifest.policy_version))
        return len(self.versions) - 1

    async def pull(
        self, *, batch: int, trainer_version: int, held: Sequence[str], max_groups: int, wait_s: float
    ) -> list[RolloutGroup]:
        assert batch > self.acknowledged, "an acknowledged batch is never asked for again"
        if self.stop_at_pull is not None and batch == self.stop_at_pull[0]:
            self.stop_at_pull[1].set()
            return []
        self.log.append(("pull", batch))
        groups = [make_group(batch, number) for number in range(max_groups)]
        return [group for group in groups if group.group_id not in held][:1]  # one at a time, as they become ready

    async def report(self, *, batch: int, metrics: Mapping[str, float], **rest: Any) -> None:
        if batch == self.fail_report_of:
            self.fail_report_of = -1
            raise ConnectionError("killed")
        self.reports[batch] = dict(metrics)
        self.steps[batch] = (rest["trainer_version"], rest["optimizer_steps"])
        self.alarms[batch] = set(rest["alarms"])

    async def acknowledge(self, through_batch: int) -> int:
        self.log.append(("acknowledge", through_batch))
        self.acknowledged = max(self.acknowledged, through_batch)
        return 1


def make_group(batch: int, number: int) -> RolloutGroup:
    rollouts = []
    for i in range(2):
        rollout = make_rollout("", f"g{batch}.{number}-{i}", tokens=make_tokens(5, first=1 + batch + 7 * i))
        rollouts.append(
            VerifiedRollout(f"r{batch}.{number}.{i}", rollout.sample_id, "w", rollout, float(i), (-5.0,) * 5, True)
        )
    return RolloutGroup(f"g{batch}.{number}", f"sums/{batch}", "sums", (1, 2, 3), 2, tuple(rollouts))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def origin(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Versions that the origin was told of."""
    told: list[int] = []

    async def announce(url: str, envelope: SignedEnvelope) -> bool:
        told.append(open_manifest(envelope, (TRAINER.key_id,)).policy_version)
        return True

    monkeypatch.setattr(publish_module, "announce", announce)
    return told


class Bench:
    """What survives a trainer: its folder, the coordinator, the stop button."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.coordinator = Coordinator()
        self.stop = asyncio.Event()

    def trainer(self, **changes: Any) -> Trainer:
        config = TrainerConfig(
            origin_data=self.folder / "origin",
            checkpoints=self.folder / "checkpoints",
            learning_rate=1e-3,
            threads=1,
            **{"versions": 2, **changes},
        )
        run = TrainerRun(model_path=self.model, trainer=config)
        return Trainer(run, self.coordinator, TRAINER, self.stop)  # type: ignore[arg-type]


@pytest.fixture
def bench(tmp_path: Path, model: Path, origin: list[int]) -> Bench:
    return Bench(tmp_path, model)


async def test_it_publishes_version_0_then_one_version_per_batch(bench: Bench, origin: list[int]) -> None:
    steps: list[int] = []
    await bench.trainer(versions=2).run(lambda batch, result: steps.append(batch))
    assert steps == [1, 2]
    assert len(set(bench.coordinator.versions)) == 3
    assert origin == [0, 1, 2]
    assert bench.coordinator.reports.keys() == {0, 1}
    assert bench.coordinator.reports[0]["reward_mean"] == 0.5
    assert bench.coordinator.acknowledged == 1


async def test_a_batch_is_acknowledged_only_when_a_checkpoint_holds_it(bench: Bench) -> None:
    held: list[tuple[int, list[str]]] = []
    acknowledge = bench.coordinator.acknowledge

    async def checked(through_batch: int) -> int:
        held.append((through_batch, sorted(path.name for path in (bench.folder / "checkpoints").iterdir())))
        return await acknowledge(through_batch)

    bench.coordinator.acknowledge = checked  # type: ignore[method-assign]
    await bench.trainer(versions=3, checkpoint_every=2).run()
    assert [batch for batch, _ in held] == [1, 2]
    assert all(folders for _, folders in held)


async def test_it_resumes_where_it_ended(bench: Bench, origin: list[int]) -> None:
    await bench.trainer(versions=2).run()
    known = list(bench.coordinator.versions)
    await bench.trainer(versions=4).run()
    assert bench.coordinator.versions[:3] == known
    assert len(bench.coordinator.versions) == 5
    pulled = [batch for what, batch in bench.coordinator.log if what == "pull"]
    assert sorted(set(pulled)) == [0, 1, 2, 3]
    assert pulled == sorted(pulled), "no batch is trained on again"


async def test_an_interrupted_run_comes_out_as_an_uninterrupted_one(bench: Bench, tmp_path: Path, model: Path) -> None:
    other = Bench(tmp_path / "other", model)
    await other.trainer(versions=4, checkpoint_every=2).run()
    bench.coordinator.fail_report_of = 2
    with pytest.raises(ConnectionError):
        await bench.trainer(versions=4, checkpoint_every=2).run()
    await settle()
    await bench.trainer(versions=4, checkpoint_every=2).run()
    assert bench.coordinator.versions == other.coordinator.versions
    assert bench.coordinator.reports[3] == pytest.approx(
        {**other.coordinator.reports[3], "step_seconds": bench.coordinator.reports[3]["step_seconds"]}
    )


async def test_a_replay_that_comes_out_otherwise_gets_the_next_number(bench: Bench, origin: list[int]) -> None:
    bench.coordinator.fail_report_of = 0
    with pytest.raises(ConnectionError):
        await bench.trainer(versions=3, checkpoint_every=2).run()
    await settle()
    assert len(bench.coordinator.versions) == 2
    bench.coordinator.versions[1] = "sha256:" + "0" * 64
    await bench.trainer(versions=3, checkpoint_every=2).run()
    assert bench.coordinator.versions[1] == "sha256:" + "0" * 64, "what workers hold keeps its number"
    assert len(bench.coordinator.versions) == 4
    assert bench.coordinator.reports.keys() == {0, 1}


async def test_only_adapters_train_and_whole_versions_are_published(bench: Bench, origin: list[int]) -> None:
    await bench.trainer(versions=2, lora_rank=4, recompute_activations=True).run()
    assert origin == [0, 1, 2]
    assert len(set(bench.coordinator.versions)) == 3
    known = list(bench.coordinator.versions)
    await bench.trainer(versions=3, lora_rank=4, recompute_activations=True).run()
    assert bench.coordinator.versions[:3] == known


async def test_after_a_rollback_old_weights_are_published_under_a_new_number(bench: Bench, origin: list[int]) -> None:
    await bench.trainer(versions=3, keep_checkpoints=9).run()
    root = bench.folder / "checkpoints"
    chosen = newest_up_to(root, 1)
    bench.coordinator.kept = 1
    go_back(root, chosen, version=4, batch=3, keep=9)
    await bench.trainer(versions=5, keep_checkpoints=9).run()
    assert origin == [0, 1, 2, 3, 4, 5]
    pulled = [batch for what, batch in bench.coordinator.log if what == "pull"]
    assert sorted(set(pulled)) == [0, 1, 2, 3], "the withdrawn versions' batches are not trained on again"
    saved = load_file(root / "checkpoint-00000003" / "weights.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in chosen.weights.items())


async def test_after_a_rollback_between_versions_the_weights_are_announced(bench: Bench, origin: list[int]) -> None:
    settings = {"publish_every": 2, "keep_checkpoints": 9}
    await bench.trainer(versions=2, **settings).run()
    root = bench.folder / "checkpoints"
    (root / "checkpoint-00000004").rename(root / "lost")  # what is left for version 2 is a step on the way to it
    bench.coordinator.kept = 2
    go_back(root, newest_up_to(root, 2), version=3, batch=4, keep=9)
    await bench.trainer(versions=4, **settings).run()
    assert origin == [0, 1, 2, 3, 4]
    assert bench.coordinator.steps[4] == (3, 4), "the first step after it is made by the version that was announced"


async def test_several_steps_make_a_version(bench: Bench, origin: list[int]) -> None:
    await bench.trainer(versions=2, publish_every=3).run()
    assert origin == [0, 1, 2]
    assert bench.coordinator.reports.keys() == set(range(6))
    fresh = [batch for batch in range(6) if bench.coordinator.reports[batch]["approx_kl_fresh"] > 0.0]
    assert fresh == [0], "all data is of version 0, and after the first step the weights are not"
    assert [bench.coordinator.steps[batch] for batch in range(6)] == [(0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6)]


@pytest.mark.parametrize("fails_at", [1, 2, 3])
async def test_an_interruption_between_versions_changes_nothing(
    bench: Bench, tmp_path: Path, model: Path, fails_at: int
) -> None:
    other = Bench(tmp_path / "other", model)
    await other.trainer(versions=2, publish_every=3).run()
    bench.coordinator.fail_report_of = fails_at
    with pytest.raises(ConnectionError):
        await bench.trainer(versions=2, publish_every=3).run()
    await settle()
    await bench.trainer(versions=2, publish_every=3).run()
    assert bench.coordinator.versions == other.coordinator.versions


async def test_lost_checkpoints_are_never_passed_over(bench: Bench) -> None:
    bench.coordinator.acknowledged = 4
    with pytest.raises(UserError, match="restore"):
        await bench.trainer().run()
    assert bench.coordinator.versions == []


async def test_stopping_ends_with_a_checkpoint(bench: Bench) -> None:
    bench.coordinator.stop_at_pull = (1, bench.stop)
    await bench.trainer(versions=10, checkpoint_every=5).run()
    assert bench.coordinator.acknowledged == 0
    assert len(bench.coordinator.versions) == 2


async def test_a_resumed_trainer_that_stops_at_once_writes_nothing(bench: Bench) -> None:
    await bench.trainer(versions=1).run()
    folder = bench.folder / "checkpoints" / "checkpoint-00000001"
    before = folder.stat().st_ino
    bench.stop.set()
    await bench.trainer(versions=9).run()
    assert folder.stat().st_ino == before, "the same folder, not one like it"


async def test_gradients_that_stay_broken_end_the_run(bench: Bench, tmp_path: Path) -> None:
    bench.model = build_tiny_model(tmp_path / "broken")
    file = bench.model / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(OurFault, match="2 steps in a row"):
        await bench.trainer(versions=9, max_skipped_steps=2).run()
    assert bench.coordinator.reports[0]["applied"] == 0.0
    assert bench.coordinator.reports[0]["alarm/skipped"] == 1.0
    assert "skipped" in bench.coordinator.alarms[0] and "gave_up" not in bench.coordinator.alarms[0]
    assert {"skipped", "gave_up"} <= bench.coordinator.alarms[1]
    assert bench.coordinator.acknowledged == 0, "everything before the last step is in a checkpoint"
    await settle()


async def settle() -> None:
    """Let what the dead trainer publishes in the background come to its end."""
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name().startswith("publish")))
