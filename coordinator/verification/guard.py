"""Guards the verifier against what it verifies: rollouts are examined in a child with limits on time and memory.

A rollout that crashes the child, hangs it, fills its memory or brings about an error that nobody foresaw costs the
batch it came with another try, in halves, until it is alone: then it is INCONCLUSIVE, our fault like every failure of
ours, and alone from the start when it comes again (`verdicts` alerts at its second time, and gives it up at its fifth).
The others have their verdicts by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from coordinator.store.rollouts import PendingRollout
from coordinator.verification import child
from coordinator.verification.examination import inconclusive
from protocol.errors import OurFault
from protocol.rollout import Verdict

log = logging.getLogger(__name__)

EXAMINER = "coordinator.verification.examiner:Examiner"
_START_SECONDS = 600.0  # imports of torch on a machine that has better things to do
_LOOK_SECONDS = 0.25
_ANSWER_BYTES_MAX = 1 << 30
_MEMORY_SHARE = 0.9
_SUSPECTS_MAX = 1024
_LOST = "the process that examines rollouts was lost:"


@dataclass(frozen=True, slots=True)
class GuardLimits:
    """Of one examination. `memory_bytes`: resident; None for nine tenths of this machine's."""

    seconds: float = 600.0
    memory_bytes: int | None = None


class ChildLost(OurFault):
    """The child died, or was ended for going over a limit."""


class Unforeseen(OurFault):
    """The child lives and has no verdicts, for a reason that is no fault of ours that we know: a rollout may be it."""


class Guard:
    """Asks one child, started when it is first needed and again after each death. Use from one task at a time.

    `settings` go to what `maker` names, in the child. `limits` may be those of a test.
    """

    def __init__(self, settings: Any, limits: GuardLimits | None = None, maker: str = EXAMINER) -> None:
        self._settings = settings
        self._limits = limits or GuardLimits()
        self._memory_bytes = self._limits.memory_bytes or int(_MEMORY_SHARE * _machine_bytes())
        self._maker = maker
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._suspects: dict[str, None] = {}  # rollouts that a child did not survive alone, oldest first

    async def warm_up(self, digest: str, folder: Path) -> None:
        """Load a version. Raises OurFault if that fails."""
        await self._ask("warm_up", {"digest": digest, "folder": folder})

    async def examine(
        self, items: Sequence[PendingRollout], folders: Mapping[str, Path], *, exact: bool = False
    ) -> dict[str, Verdict]:
        """Verdicts by id, as Examiner.examine gives them."""
        known = [item for item in items if item.rollout_id in self._suspects]
        found = await self._try([item for item in items if item.rollout_id not in self._suspects], folders, exact)
        for item in known:
            found |= await self._try([item], folders, exact)
        return found

    async def _try(
        self, items: Sequence[PendingRollout], folders: Mapping[str, Path], exact: bool
    ) -> dict[str, Verdict]:
        """The verdicts of these; in halves if the child is lost with them."""
        if not items:
            return {}
        ids = [item.rollout_id for item in items]
        try:
            return await self._verdicts(items, folders, exact)
        except (ChildLost, Unforeseen) as error:
            action = "child_lost" if isinstance(error, ChildLost) else "unforeseen"
            log.error("%s, with %d rollouts", error, len(items), extra={"action": action, "rollouts": ids[:8]})
            if len(items) == 1:
                self._suspect(ids[0])
                return {ids[0]: inconclusive(OurFault(f"{error}, with this rollout alone"))}
        except OurFault as error:
            return {each: inconclusive(error) for each in ids}
        middle = len(items) // 2
        first = await self._try(items[:middle], folders, exact)
        return first | await self._try(items[middle:], folders, exact)

    async def _verdicts(
        self, items: Sequence[PendingRollout], folders: Mapping[str, Path], exact: bool
    ) -> dict[str, Verdict]:
        answer = await self._ask("examine", {"items": list(items), "folders": dict(folders), "exact": exact})
        try:
            return child.read_verdicts(answer, {item.rollout_id for item in items})
        except (ValueError, TypeError, KeyError) as error:
            raise Unforeseen(f"the examination's verdicts are none: {type(error).__name__}: {error}") from error

    def _suspect(self, rollout_id: str) -> None:
        self._suspects[rollout_id] = None
        if len(self._suspects) > _SUSPECTS_MAX:
            del self._suspects[next(iter(self._suspects))]

    async def close(self) -> None:
        """End the child. Safe to call twice."""
        await self._end()

    async def _end(self) -> int | None:
        """End the child, whatever it does; its exit status, a signal as a negative number."""
        process, pipe, self._process, self._pipe = self._process, self._pipe, None, None
        if process is None or pipe is None:
            return None
        pipe.close()
        if process.pid is None:
            return None
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # its group, once it leads one
        process.kill()
        await asyncio.to_thread(process.join)
        return process.exitcode

    async def _ask(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """The child's answer. Raises ChildLost if it was lost meanwhile, OurFault if it did not start or says it failed."""
        try:
            if self._process is None:
                await self._start()
            assert self._pipe is not None
            await asyncio.to_thread(self._pipe.send, (method, arguments))
            answer = json.loads(await self._receive(self._limits.seconds))
        except (OSError, EOFError, json.JSONDecodeError) as error:
            raise ChildLost(f"{_LOST} it ended with status {await self._end()}") from error
        except asyncio.CancelledError:
            await self.close()  # or its answer would be taken for another's
            raise
        if not isinstance(answer, dict) or "unforeseen" in answer:
            why = answer["unforeseen"] if isinstance(answer, dict) else "no answer"
            raise Unforeseen(f"the examination failed: {why}")
        if "fault" in answer:
            raise OurFault(f"the examination failed: {answer['fault']}")
        return answer

    async def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would share locks and accelerators
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=child.serve, args=(theirs, self._maker, self._settings), name="examiner")
        try:
            try:
                await asyncio.to_thread(self._process.start)
            finally:
                theirs.close()
            await self._receive(_START_SECONDS)
        except (OSError, EOFError, ChildLost) as error:  # not for what it was asked: no rollout is to blame
            status = await self._end()
            raise OurFault(
                f"the process that examines rollouts did not start (status {status}): see the log"
            ) from error

    async def _receive(self, seconds: float) -> bytes:
        """What the child sends next. Raises EOFError if it dies, ChildLost (and ends it) if it goes over a limit."""
        assert self._pipe is not None and self._process is not None
        deadline = time.monotonic() + seconds
        while not await asyncio.to_thread(self._pipe.poll, _LOOK_SECONDS):
            if time.monotonic() > deadline:
                await self._end()
                raise ChildLost(f"{_LOST} it took longer than {seconds:g} s")
            used = _resident_bytes(self._process.pid)
            if used > self._memory_bytes:
                await self._end()
                raise ChildLost(f"{_LOST} it took {used >> 20} MiB of memory, {self._memory_bytes >> 20} are its limit")
        return await asyncio.to_thread(self._pipe.recv_bytes, _ANSWER_BYTES_MAX)


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _resident_bytes(process: int | None) -> int:
    """Memory that a process has in RAM; 0 where nobody says."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
