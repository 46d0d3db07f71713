"""`trainer run` from its files to its end, with a trainer that only evaluates."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainer.periodic_evaluation as periodic_evaluation
import trainer.run as module
from coordinator import trainer_token
from protocol import keyfile
from tests.factories import TRAINER
from trainer.periodic_evaluation import PeriodicEvaluation
from trainer.steplog import StepLogs


class Client:
    """Stands for the coordinator."""

    def __init__(self, *arguments: Any, **rest: Any) -> None:
        self.closed = False

    async def close(self) -> None:
        self.closed = True


class Trainer:
    """Begins to evaluate version 5, and is done."""

    interrupted = False

    def __init__(
        self, run: Any, client: Client, identity: Any, stop: asyncio.Event, team: Any, evaluation: PeriodicEvaluation
    ) -> None:
        self._stop, self._evaluation = stop, evaluation

    async def run(self, on_step: Callable[..., None]) -> None:
        await self._evaluation.begin({}, 5)
        if self.interrupted:
            self._stop.set()


class Log:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self.numbers |= numbers

    def close(self) -> None:
        pass


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    keyfile.write(tmp_path / "trainer.key", TRAINER)
    trainer_token.load_or_create(tmp_path / "trainer.token")
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "model"\n[trainer]\nevaluate_every = 5\n')
    return path


@pytest.mark.parametrize("interrupted", [False, True])
async def test_the_last_evaluation_is_waited_for_unless_the_run_is_interrupted(
    config: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, interrupted: bool
) -> None:
    async def evaluate(command: list[str]) -> tuple[int, str]:
        await asyncio.sleep(600.0 if interrupted else 0.05)
        cell = {"mean": 0.5, "low": 0.25, "high": 0.75}
        result.write_text(json.dumps({"environments": {"sums": {"avg@4": cell}}}))
        return 0, ""

    async def rotations(origin: str) -> list[Any]:
        return []

    log, result = Log(), config.parent / "evaluations" / "version-5.json"
    monkeypatch.setattr(Trainer, "interrupted", interrupted)
    monkeypatch.setattr(periodic_evaluation, "_run", evaluate)
    monkeypatch.setattr(module, "Trainer", Trainer)
    monkeypatch.setattr(module, "TrainerClient", Client)
    monkeypatch.setattr(module, "_rotations", rotations)
    monkeypatch.setattr(module, "open_logs", lambda *_: StepLogs([log]))
    with caplog.at_level(logging.INFO):
        await module.run_trainer(config, {})
    told = {} if interrupted else {"eval/version": 5.0, "eval/sums/avg@4": 0.5}
    assert told.items() <= log.numbers.items() and bool(told) == bool(log.numbers)
    assert ("version 5 is evaluated: sums/avg@4 0.500" in caplog.text) == (not interrupted)
    assert list((config.parent / "evaluations").glob(".version-*")) == []
