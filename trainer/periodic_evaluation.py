"""Evaluation during training: every so-manyth version is evaluated by a process of its own, beside the steps.

    version ─ a folder of its own ─▶ `trainer evaluate` ─▶ evaluations/version-<v>.json, and `eval/…` in the next step's report

One evaluation runs at a time; a version that comes while one runs is not evaluated, and that is logged. One that fails is
logged and changes nothing else: training never waits for it. Only at the run's end is the one under way waited for
(`finish`), until it has ended or a person interrupts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.publish import write_version

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """`every`: versions. `config`: the run file. `model`: the initial policy's folder. `out`: folder of the results."""

    config: Path
    model: Path
    out: Path
    every: int
    tasks: int
    samples: int


class PeriodicEvaluation:
    """Evaluates in the background. `collect` gives the numbers of what has ended since."""

    def __init__(self, plan: EvaluationPlan) -> None:
        self._plan = plan
        self._running: asyncio.Task[None] | None = None
        self._found: dict[str, float] = {}

    def due(self, version: int) -> bool:
        """Whether this version is to be evaluated and may be now."""
        if version % self._plan.every:
            return False
        if self._running is not None and not self._running.done():
            log.warning("version %d is not evaluated: the one before still is", version, extra={"action": "evaluation"})
            return False
        return True

    async def begin(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Evaluate these weights; returns as soon as they are written. If they can't be, that is logged."""
        folder = self._plan.out / f".version-{version}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            await asyncio.to_thread(write_version, weights, self._plan.model, folder)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            why = f"cannot write {folder}: {error}; free space or fix permissions"
            log.warning("version %d is not evaluated: %s", version, why, extra={"action": "evaluation"})
            return
        self._running = asyncio.create_task(self._evaluate(folder, version), name=f"evaluate {version}")

    def collect(self) -> dict[str, float]:
        """Numbers of evaluations that ended, once each."""
        found, self._found = self._found, {}
        return found

    async def finish(self, stop: asyncio.Event) -> None:
        """Wait for the one that runs, if any, and no longer than until `stop` is set."""
        if self._running is None:
            return
        told = asyncio.create_task(stop.wait())
        await asyncio.wait({self._running, told}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()

    async def close(self) -> None:
        """Stop the one that runs, if any; its progress is kept."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _evaluate(self, folder: Path, version: int) -> None:
        out = self._plan.out / f"version-{version}.json"
        try:
            code, said = await _run(self._command(folder, out))
            if code != 0:
                log.warning("version %d could not be evaluated: %s", version, said, extra={"action": "evaluation"})
                return
            self._found = numbers_of(json.loads(out.read_text())) | {"eval/version": float(version)}
        except OSError as error:
            log.warning("version %d could not be evaluated: %s", version, error, extra={"action": "evaluation"})
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _command(self, folder: Path, out: Path) -> list[str]:
        plan = self._plan
        options = {
            "--config": plan.config,
            "--model": folder,
            "--out": out,
            "--tasks": plan.tasks,
            "--samples": plan.samples,
        }
        pairs = [part for name, value in options.items() for part in (name, str(value))]
        return [sys.executable, "-m", "trainer.main", "evaluate", *pairs]


async def _run(command: list[str]) -> tuple[int, str]:
    """(exit code, the last line of stderr); the process ends with the task that waits for it."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        _, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = stderr.decode(errors="replace").strip().splitlines()
    return process.returncode or 0, lines[-1] if lines else ""


def numbers_of(result: Mapping[str, Any]) -> dict[str, float]:
    """`eval/<environment>/<measure>` and its interval, from what `trainer evaluate` wrote."""
    numbers: dict[str, float] = {}
    for name, values in result["environments"].items():
        for what, value in values.items():
            if "@" in what:
                ends = {"mean": "", "low": "/low", "high": "/high"}
                numbers |= {f"eval/{name}/{what}{ends[end]}": float(value[end]) for end in ends}
    return numbers
