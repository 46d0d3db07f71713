"""Scores completions in unprivileged child processes without our secrets, with limits on time, memory and output."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.scorer import LENGTH, MAX_MESSAGE_BYTES, encode
from protocol.errors import EnvironmentFault
from protocol.rollout import Task

_START_SECONDS = 60.0
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class ScorerLimits:
    """Limits of one scoring. Wall time includes loading the environment's libraries on its first use."""

    item_seconds: float = 20.0
    memory_bytes: int = 2 << 30
    cpu_seconds: int = 20


class Scorer:
    """A pool of scoring processes, started when first needed, each asked one thing at a time.

    A process that raised lives on; one that ran out of its limits, died or talked nonsense is killed and replaced.
    All of that is EnvironmentFault: the environment's fault, never the worker's.
    `preload`: (name, params) of environments to load before privileges are dropped.
    """

    def __init__(
        self,
        processes: int = 1,
        limits: ScorerLimits | None = None,
        preload: Sequence[tuple[str, Mapping[str, Any]]] = (),
    ) -> None:
        self._limits = limits or ScorerLimits()
        self._preload = [(name, dict(params)) for name, params in preload]
        self._slots: asyncio.Queue[_Child] = asyncio.Queue()
        self._children = [_Child(self._limits, self._preload) for _ in range(processes)]
        for child in self._children:
            self._slots.put_nowait(child)

    async def score(self, environment: str, params: Mapping[str, Any], task: Task, completion: str) -> float:
        """The reward of `completion` for `task`, in [0, 1]. Raises EnvironmentFault if scoring fails."""
        fields = {"environment": task.environment, "index": task.index, "prompt": task.prompt}
        message = {
            "environment": environment,
            "params": dict(params),
            "task": {**fields, "reference": task.reference},
            "completion": completion,
        }
        child = await self._slots.get()
        try:
            answer = await child.ask(message)
        finally:
            self._slots.put_nowait(child)
        if "score" not in answer:
            raise EnvironmentFault(f"scoring {task.task_id} failed: {answer.get('error', 'no score')}")
        return float(answer["score"])

    async def close(self) -> None:
        """Stop all processes. Safe to call twice."""
        for child in self._children:
            await child.kill()


class _Child:
    """One scoring process. Whatever interrupts an exchange kills it, so an answer is never taken for another's."""

    def __init__(self, limits: ScorerLimits, preload: list[tuple[str, dict[str, Any]]]) -> None:
        self._limits = limits
        self._preload = preload
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            request = encode(message)
        except (TypeError, ValueError) as error:
            raise EnvironmentFault(f"the task cannot be sent to its scorer: {error}") from error
        if self._process is None:
            await self._start()
        return await self._exchange(request, self._limits.item_seconds)

    async def kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        await process.wait()

    async def _start(self) -> None:
        limits = (str(self._limits.memory_bytes), str(self._limits.cpu_seconds))
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "environments.scorer",
                *limits,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=clean_environ(),
                cwd="/",
                limit=MAX_MESSAGE_BYTES + LENGTH.size,
            )
        except OSError as error:  # no memory, no process or no descriptor left
            raise EnvironmentFault(f"the scoring process can't be started: {error}") from error
        answer = await self._exchange(encode({"preload": self._preload}), _START_SECONDS)
        if not answer.get("ready"):
            await self.kill()
            raise EnvironmentFault(f"the scoring process did not start: {answer.get('error', 'no reason given')}")

    async def _exchange(self, request: bytes, seconds: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(seconds):
                return await self._round_trip(request)
        except TimeoutError:
            await self.kill()
            raise EnvironmentFault(f"scoring took longer than {seconds:g} s and was stopped") from None
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            await self.kill()
            raise EnvironmentFault(f"the scoring process died or sent nonsense ({type(error).__name__})") from error
        except BaseException:
            await self.kill()
            raise

    async def _round_trip(self, request: bytes) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        process.stdin.write(request)
        await process.stdin.drain()
        (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        if size > MAX_MESSAGE_BYTES:
            raise ValueError(f"an answer of {size} bytes")
        answer = json.loads(await process.stdout.readexactly(size))
        if not isinstance(answer, dict):
            raise ValueError("an answer that is no object")
        return answer


def clean_environ() -> dict[str, str]:
    """What a scoring process may know of our environment: where Python finds modules, and no secret."""
    paths = [str(_ROOT), *(path for path in sys.path if path and Path(path).is_absolute())]
    return {
        "PATH": os.defpath,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "LANG": "C.UTF-8",
        # Numerical libraries would otherwise start a thread per core and map gigabytes against the memory limit.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
