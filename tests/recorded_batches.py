"""A run whose batches are made before it is trained on: one database, from which several trainings get the very same."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from coordinator.store.database import Database
from protocol.rollout import Outcome, Verdict, VersionSpan
from tests.factories import make_identity, make_rollout, make_tokens, sign_rollout
from tests.stored_run import StoredRun

_WORKER = make_identity(21)
_OLD = -5.5  # about the log of 1 / 260: what a random model gives its tokens


async def begin(url: str, batches: int) -> StoredRun:
    """A run that lets so many batches of two groups of two lie ready. It has no version yet."""
    run = await StoredRun.begin(url, versions=0, max_staleness=2 * batches)
    await run.join(_WORKER)
    return run


async def record(run: StoredRun, batches: int) -> None:
    """Rollouts of version 0 for so many batches, verified, of different tokens and lengths; rewards 0 and 1."""
    head, _ = await run.feeding.state()
    assert head is not None and head.version == 0
    for number in range(4 * batches):
        lease = await run.lease_one(_WORKER)
        rollout = make_rollout(
            lease.lease_id, lease.sample_id, tokens=make_tokens(5 + number % 7, first=1 + 3 * number)
        )
        length = len(rollout.token_ids)
        rollout = replace(rollout, spans=(VersionSpan(0, head.manifest_digest, 0, length),))
        await run.intake.submit(_WORKER.key_id, sign_rollout(rollout, _WORKER))
        (pending,) = await run.claim()
        verdict = Verdict(
            Outcome.ACCEPTED,
            reward=float(number % 2),
            old_logprobs=tuple(_OLD + (number + place) % 5 / 50 for place in range(length)),
            entropies=(5.0,) * length,
        )
        assert await run.record(pending.rollout_id, verdict)


def copy_of(database: Path, folder: Path, scheduling_of: StoredRun) -> StoredRun:
    """The recorded run on a database of its own in `folder`."""
    folder.mkdir()
    shutil.copyfile(database, folder / "run.db")
    return StoredRun(Database.open(f"sqlite+aiosqlite:///{folder / 'run.db'}"), scheduling_of.scheduling)
