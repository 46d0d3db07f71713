"""Scoring processes: confined, replaced when they misbehave, never mixing up answers."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from environments.registry import make_environment
from environments.sandbox import Scorer, ScorerLimits
from protocol.errors import EnvironmentFault
from protocol.rollout import Task

HERE = Path(__file__).parent
HOSTILE = "hostile_environment:Hostile"
TASK = Task("hostile", 0, "", None)
DEADLINE = 60


@pytest.fixture
async def scorer(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(HERE)])
    monkeypatch.setenv("ROLLSWARM_SECRET", "hunter2")
    limits = ScorerLimits(item_seconds=3.0, memory_bytes=1 << 30, cpu_seconds=30)
    made = Scorer(processes=1, limits=limits, preload=[(HOSTILE, {}), ("arithmetic", {})])
    yield made
    await made.close()


async def hostile(scorer: Scorer, action: str) -> float:
    async with asyncio.timeout(DEADLINE):
        return await scorer.score(HOSTILE, {}, TASK, action)


async def test_it_scores_like_the_environment_itself(scorer):
    environment = make_environment("arithmetic")
    for index in range(3):
        task = environment.task(index)
        assert await scorer.score("arithmetic", {}, task, f" {task.reference}") == 1.0
        assert await scorer.score("arithmetic", {}, task, " 1000") == 0.0


async def test_a_reward_that_raises_is_the_environments_fault_and_scoring_goes_on(scorer):
    with pytest.raises(EnvironmentFault, match="ValueError: bad luck"):
        await hostile(scorer, "raise bad luck")
    assert await hostile(scorer, "ok") == 1.0


@pytest.mark.parametrize(
    ("action", "said"),
    [("spin", "longer than"), ("die", "died"), ("hoard", "MemoryError"), ("overpay 1.5", "not in"),
     ("overpay nan", "not in")],
)  # fmt: skip
async def test_limits_end_a_scoring_and_the_next_one_works(scorer, action, said):
    with pytest.raises(EnvironmentFault, match=said):
        await hostile(scorer, action)
    assert await hostile(scorer, "ok") == 1.0


async def test_what_an_environment_prints_is_not_taken_for_an_answer(scorer):
    assert await hostile(scorer, "print") == 1.0
    assert await hostile(scorer, "ok") == 1.0


async def test_no_secret_reaches_the_process(scorer):
    with pytest.raises(EnvironmentFault) as caught:
        await hostile(scorer, "environ")
    assert "PYTHONPATH" in str(caught.value)
    assert "ROLLSWARM_SECRET" not in str(caught.value)


async def test_it_may_write_no_file(scorer, tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(EnvironmentFault):
        await hostile(scorer, f"write {tmp_path / 'file'}")
    assert not (tmp_path / "file").exists() or (tmp_path / "file").stat().st_size == 0


async def test_it_gives_up_root(scorer):
    with pytest.raises(EnvironmentFault) as caught:
        await hostile(scorer, "uid")
    seen = int(str(caught.value).rsplit(" ", 1)[1])
    assert seen != 0
    assert seen == os.getuid() or os.getuid() == 0


async def test_a_cancelled_scoring_leaves_no_answer_for_the_next(scorer):
    assert await hostile(scorer, "ok") == 1.0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await scorer.score(HOSTILE, {}, TASK, "spin")
    with pytest.raises(EnvironmentFault, match="second"):
        await hostile(scorer, "raise second")


async def test_an_environment_that_does_not_load_says_why():
    scorer = Scorer(preload=[("arithmetic", {"max_a": 0})])
    with pytest.raises(EnvironmentFault, match="max_a"):
        await scorer.score("arithmetic", {}, TASK, "")
    await scorer.close()


async def test_a_process_that_cannot_be_started_is_the_environments_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError("no process left")

    monkeypatch.setattr("asyncio.create_subprocess_exec", refuse)
    scorer = Scorer()
    with pytest.raises(EnvironmentFault, match="no process left"):
        await scorer.score("arithmetic", {}, Task("arithmetic", 0, "p", "1"), "1")
