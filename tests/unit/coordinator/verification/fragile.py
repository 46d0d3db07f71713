"""An examiner that rollouts of certain ids do harm to, for tests of what guards against that."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from coordinator.store.rollouts import PendingRollout
from protocol.errors import OurFault
from protocol.rollout import Outcome, Verdict


class Fragile:
    """Takes its time limit, its memory or its life from what an id begins with. `settings`: a file that notes each batch."""

    def __init__(self, settings: Path) -> None:
        self._log = settings

    def warm_up(self, digest: str, folder: Path) -> None:
        if digest == "missing":
            raise OurFault(f"{folder} holds nothing")

    def examine(
        self, items: Sequence[PendingRollout], folders: Mapping[str, Path], *, exact: bool = False
    ) -> dict[str, Verdict]:
        with self._log.open("a") as stream:
            stream.write(" ".join(item.rollout_id for item in items) + "\n")
        return {item.rollout_id: self._verdict(item.rollout_id) for item in items}

    def _verdict(self, rollout_id: str) -> Verdict:
        if rollout_id.startswith("dies"):
            os.kill(os.getpid(), signal.SIGSEGV)
        if rollout_id.startswith("exits"):
            os._exit(0)
        if rollout_id.startswith("hangs"):
            threading.Event().wait()
        if rollout_id.startswith("eats"):
            self._eaten = bytearray(os.urandom(1 << 20)) * 400
            threading.Event().wait()
        if rollout_id.startswith("raises"):
            raise ValueError("unforeseen")
        return Verdict(Outcome.ACCEPTED, old_logprobs=(-0.5, -1.25), metrics={"m": float("nan")}, detail="\u2028")
