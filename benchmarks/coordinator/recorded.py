"""A verifier whose verdicts are recorded: it claims and writes by the product's own code, and prefills nothing.

Every rollout is accepted, with log-probs of its length, so that what is stored is as large as what a prefill yields.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import uvloop

from coordinator.config import load_run_file
from coordinator.garbage import settle
from coordinator.store.database import Database
from coordinator.store.rollouts import PendingRollout
from coordinator.verification.classes import classes_of
from coordinator.verification.judge import Judge
from coordinator.verification.pooled import Pooled
from coordinator.verification.process import Verifier
from protocol.rollout import Outcome, Verdict
from shardcast.client import ShardcastClient

# What the checks of one honest rollout measure, and what the tests over many take from it.
_METRICS = {"proof_mantissa_mean": 0.6, "proof_exponent": 0.4, "logprob_gap": 0.01, "seed_margin_mean": 0.001}
_OBSERVED = ("proof_mantissa", "proof_exponent", "logprob_gap", "seed_margin")


class RecordedJudge:
    """Judges as `coordinator.verification.judge.Judge` does, without looking."""

    def __init__(self, pooled: dict[str, Pooled]) -> None:
        self.pooled = pooled
        self.audit_floor = 1.0

    async def warm_up(self, version: int, manifest_digest: str) -> None:
        """There are no weights."""

    async def judge(self, pending: Sequence[PendingRollout]) -> dict[str, Verdict]:
        return {item.rollout_id: self._accept(len(item.rollout.token_ids), item) for item in pending}

    def _accept(self, tokens: int, item: PendingRollout) -> Verdict:
        return Verdict(
            Outcome.ACCEPTED,
            reward=float(item.seed % 2),
            old_logprobs=(-0.5,) * tokens,
            entropies=(0.25,) * tokens,
            metrics=_METRICS,
            admitted=_METRICS,
            observations=dict.fromkeys(_OBSERVED, 0.0),
        )


class NoWeights:
    """Stands for the SHARDCAST client, of which the verifier asks to forget old versions."""

    def prune(self, keep: set[int]) -> None:
        """There are none."""


async def verify(config: Path) -> None:
    run_file = load_run_file(config)
    pooled = {name: thresholds.pooled for name, thresholds in classes_of(run_file.verification).items()}
    db = Database.open(run_file.run.database)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    judge: Any = RecordedJudge(pooled)
    verifier = Verifier(db, cast(Judge, judge), run_file)
    print(f"ready verifier={verifier.name}", flush=True)
    try:
        await verifier.run(stop, cast(ShardcastClient, NoWeights()))
    finally:
        await db.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coordinator.recorded")
    parser.add_argument("--config", type=Path, required=True)
    settle()
    uvloop.run(verify(parser.parse_args().config))
