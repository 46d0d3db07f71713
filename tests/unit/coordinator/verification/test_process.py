"""coordinator.verification.process: claims are held for as long as their verifier is at work, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import TypeVar, cast

import pytest

from coordinator.config import RunFile, TracingSection
from coordinator.store import tables as t
from coordinator.store.rollouts import PendingRollout
from coordinator.verification import process
from coordinator.verification.judge import Judge
from coordinator.verification.process import Verifier
from protocol.declaration import BF16
from protocol.rollout import Verdict
from protocol.signing import Identity
from shardcast.client import ShardcastClient
from tests.stored_run import MAX_STRIKES, StoredRun, accepted

T = TypeVar("T")
PATIENCE_S = 60.0
TERM_S = 1.5


class SlowJudge:
    """Accepts everything, once it is told to."""

    def __init__(self, run: StoredRun) -> None:
        self.pooled, self.audit_floor = {BF16: run.pooled}, 1.0
        self.go = asyncio.Event()

    async def warm_up(self, version: int, manifest_digest: str) -> None:
        """There are no weights."""

    async def judge(self, pending: Sequence[PendingRollout]) -> dict[str, Verdict]:
        await self.go.wait()
        return {item.rollout_id: accepted(item) for item in pending}


class NoWeights:
    def prune(self, keep: set[int]) -> None:
        """There are none."""


def verifier_of(run: StoredRun, judge: SlowJudge) -> Verifier:
    verification = SimpleNamespace(max_strikes=MAX_STRIKES, claim_term_s=TERM_S, claim_rollouts=64, audit_fraction=1.0)
    run_file = SimpleNamespace(verification=verification, scheduling=run.scheduling, tracing=TracingSection())
    return Verifier(run.db, cast(Judge, judge), cast(RunFile, run_file))


async def once(ask: Callable[[], Awaitable[T]]) -> T:
    """What it says, once that is something."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if found := await ask():
                return found
            await asyncio.sleep(0.02)


async def deadline_of(run: StoredRun, rollout: str) -> float:
    return (await run.row(t.rollouts, t.rollouts.c.rollout_id == rollout)).claim_deadline or 0.0


async def later(run: StoredRun, rollout: str, than: float) -> float:
    """The claim's deadline once it is later than this."""

    async def look() -> float:
        found = await deadline_of(run, rollout)
        return found if found > than else 0.0

    return await once(look)


async def test_who_needs_longer_than_a_claims_term_keeps_it(run: StoredRun, alice: Identity) -> None:
    """Two verifiers of a large model would take it from one another until it is given up."""
    (rollout,) = await run.work(alice, 1)
    judge, stop = SlowJudge(run), asyncio.Event()
    verifier = verifier_of(run, judge)
    working = asyncio.create_task(verifier.run(stop, cast(ShardcastClient, NoWeights())))
    first = await later(run, rollout, 0.0)
    last = first
    while last < first + TERM_S:
        last = await later(run, rollout, last)
        assert await run.claim("another") == []
    judge.go.set()
    (row,) = await once(lambda: run.rows(t.rollouts, t.rollouts.c.state == "accepted"))
    assert (row.rollout_id, row.attempts) == (rollout, 1)
    stop.set()
    await asyncio.wait_for(working, PATIENCE_S)


async def test_what_hangs_is_for_others_to_try_in_the_end(
    run: StoredRun, alice: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_HOLDS", 1)
    (rollout,) = await run.work(alice, 1)
    judge, stop = SlowJudge(run), asyncio.Event()
    working = asyncio.create_task(verifier_of(run, judge).run(stop, cast(ShardcastClient, NoWeights())))
    await later(run, rollout, await later(run, rollout, 0.0))
    found = await once(lambda: run.claim("another"))
    assert [item.rollout_id for item in found] == [rollout]
    judge.go.set()
    stop.set()
    await asyncio.wait_for(working, PATIENCE_S)
    assert await run.rollout_state(rollout) == "verifying", "whose verdict comes too late has none"
