"""Evaluation beside the training: in a process of its own, one at a time, never in its way."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import trainer.periodic_evaluation as module
from tests.tiny_model import EOS_TOKEN_ID, build_tiny_model
from trainer.periodic_evaluation import EvaluationPlan, PeriodicEvaluation, numbers_of


@pytest.fixture
def plan(tmp_path: Path) -> EvaluationPlan:
    config = tmp_path / "run.toml"
    config.write_text(
        f"[sampling]\neos_token_ids = [{EOS_TOKEN_ID}]\n[[environments]]\nname = 'sums'\nkind = 'arithmetic'\nmax_tokens = 2\n"
    )
    model = build_tiny_model(tmp_path / "model")
    return EvaluationPlan(config, model, tmp_path / "out", every=5, tasks=4, samples=1)


def weights(plan: EvaluationPlan) -> dict[str, torch.Tensor]:
    return load_file(plan.model / "model.safetensors")


async def test_a_version_is_evaluated_by_a_process_of_its_own(plan: EvaluationPlan) -> None:
    evaluation = PeriodicEvaluation(plan)
    assert [version for version in range(1, 11) if evaluation.due(version)] == [5, 10]
    await evaluation.begin(weights(plan), 5)
    await evaluation.finish(asyncio.Event())
    numbers = evaluation.collect()
    assert numbers["eval/version"] == 5.0
    assert 0.0 <= numbers["eval/sums/avg@1/low"] <= numbers["eval/sums/avg@1"] <= 1.0
    assert evaluation.collect() == {}, "each is told once"
    assert [path.name for path in plan.out.iterdir()] == ["version-5.json"]


async def test_one_at_a_time_and_closing_stops_it(plan: EvaluationPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = asyncio.Event()

    async def endless(command: list[str]) -> tuple[int, str]:
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            stopped.set()

    monkeypatch.setattr(module, "_run", endless)
    evaluation = PeriodicEvaluation(plan)
    await evaluation.begin(weights(plan), 5)
    await asyncio.sleep(0)
    assert not evaluation.due(10)
    await evaluation.close()
    assert stopped.is_set()
    assert list(plan.out.iterdir()) == []
    assert evaluation.due(10)


async def test_at_the_end_it_is_waited_for_until_told_to_stop(
    plan: EvaluationPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def endless(command: list[str]) -> tuple[int, str]:
        return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(module, "_run", endless)
    evaluation, stop = PeriodicEvaluation(plan), asyncio.Event()
    await evaluation.finish(stop)  # nothing runs
    await evaluation.begin(weights(plan), 5)
    waiting = asyncio.create_task(evaluation.finish(stop))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    stop.set()
    await waiting
    assert evaluation.collect() == {}
    await evaluation.close()


async def test_a_disk_that_refuses_ends_no_training(plan: EvaluationPlan, caplog: pytest.LogCaptureFixture) -> None:
    plan.out.write_text("a file where the folder should be")
    evaluation = PeriodicEvaluation(plan)
    await evaluation.begin(weights(plan), 5)
    await evaluation.finish(asyncio.Event())
    assert "version 5 is not evaluated" in caplog.text
    assert "free space or fix permissions" in caplog.text


async def test_one_that_fails_is_said_and_changes_nothing(
    plan: EvaluationPlan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(command: list[str]) -> tuple[int, str]:
        return 1, "no memory"

    monkeypatch.setattr(module, "_run", fails)
    evaluation = PeriodicEvaluation(plan)
    await evaluation.begin(weights(plan), 5)
    await evaluation.finish(asyncio.Event())
    assert evaluation.collect() == {}
    assert "no memory" in caplog.text


def test_numbers_and_intervals_of_a_result() -> None:
    cell = {"mean": 0.5, "low": 0.25, "high": 0.75}
    result = json.loads(json.dumps({"environments": {"sums": {"tasks": 3, "pass@2": cell, "scores": {}}}}))
    assert numbers_of(result) == {
        "eval/sums/pass@2": 0.5, "eval/sums/pass@2/low": 0.25, "eval/sums/pass@2/high": 0.75,
    }  # fmt: skip
