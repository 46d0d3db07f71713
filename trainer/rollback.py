"""`trainer rollback V`: withdraw every version after V and let the run go on from a checkpoint up to V.

    coordinator   marks the versions, revokes leases, purges what they made, and tells the first numbers never used
    here          the checkpoint's weights become the checkpoint of those numbers; later checkpoints go

The next `trainer run` publishes the old weights under a new number, so workers follow as they follow any version. Every
step may be repeated after a crash. A trainer that runs meanwhile must be stopped first: it holds weights that are withdrawn.
"""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

from coordinator import trainer_token
from coordinator.client import TrainerClient
from protocol.errors import UserError
from trainer.checkpoint import Checkpoint, checkpoints, load_checkpoint, save_checkpoint
from trainer.config import load_trainer_run


async def run_rollback(path: Path, version: int) -> str:
    """Do it, and say in a sentence what was done."""
    run = load_trainer_run(path)
    config = run.trainer
    chosen = await asyncio.to_thread(newest_up_to, config.checkpoints, version)
    client = TrainerClient(config.coordinator, trainer_token.load(config.token), ca=config.coordinator_ca)
    try:
        done = await client.withdraw(version)
    finally:
        await client.close()
    await asyncio.to_thread(
        go_back, config.checkpoints, chosen, done.next_version, done.next_batch, config.keep_checkpoints
    )
    return (
        f"{done.withdrawn} versions are withdrawn and {done.purged} rollouts purged; `trainer run` goes on with the weights "
        f"of version {chosen.policy_version} as version {done.next_version}"
    )


def newest_up_to(root: Path, version: int) -> Checkpoint:
    """The newest whole checkpoint of a version up to `version`. Raises UserError that names those there are."""
    found: list[int] = []
    for folder in checkpoints(root):
        try:
            checkpoint = load_checkpoint(folder)
        except UserError:
            continue
        if checkpoint.policy_version <= version:
            return checkpoint
        found.append(checkpoint.policy_version)
    kept = ", ".join(map(str, found)) or "none"
    raise UserError(
        f"no checkpoint in {root} is of version {version} or before (there: {kept}): keep_checkpoints keeps more"
    )


def go_back(root: Path, chosen: Checkpoint, version: int, batch: int, keep: int) -> None:
    """Save `chosen` as the checkpoint of `version` after `batch` batches, and delete those of versions in between."""
    saved = save_checkpoint(root, replace(chosen, step=batch, policy_version=version), keep=max(keep, 1 << 30))
    for folder in checkpoints(root):
        if folder != saved and load_version(folder) > chosen.policy_version:
            shutil.rmtree(folder)
    for folder in checkpoints(root)[keep:]:
        shutil.rmtree(folder)


def load_version(folder: Path) -> int:
    """Policy version of a checkpoint; a damaged one counts as later than any."""
    try:
        return load_checkpoint(folder).policy_version
    except UserError:
        return 1 << 62
