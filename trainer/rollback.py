"""`trainer rollback V`: withdraw every version after V and let the run go on from a checkpoint up to V.

    coordinator   marks the versions, revokes leases, purges what they made, and tells the first numbers never used
    here          the checkpoint's weights become the checkpoint of those numbers; later checkpoints go

With `publish_every` above 1 a checkpoint may hold steps after its version: they are part of the next one, and are withdrawn
with it. If the next one stays, they stay, too.

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
from trainer.checkpoint import Checkpoint, checkpoints, load_checkpoint, numbered, save_checkpoint
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
    steps = unpublished(chosen)
    weights = f"version {chosen.policy_version}" + (f" and {steps} steps after it" if steps else "")
    return (
        f"{done.withdrawn} versions are withdrawn and {done.purged} rollouts purged; `trainer run` goes on with the weights "
        f"of {weights} as version {done.next_version}"
    )


def newest_up_to(root: Path, version: int) -> Checkpoint:
    """The newest whole checkpoint without a step after `version`. Raises UserError that names the versions there are."""
    found: list[int] = []
    for folder in checkpoints(root):
        try:
            checkpoint = load_checkpoint(folder)
        except UserError:
            continue
        if serves(checkpoint) <= version:
            return checkpoint
        found.append(serves(checkpoint))
    kept = ", ".join(map(str, found)) or "none"
    raise UserError(
        f"no checkpoint in {root} is without steps after version {version} (there: up to {kept}): keep_checkpoints keeps more"
    )


def go_back(root: Path, chosen: Checkpoint, version: int, batch: int, keep: int) -> None:
    """Save `chosen` as the checkpoint of `version` after `batch` batches, and delete those made after `chosen`."""
    extra = {
        **chosen.extra,
        "unpublished": 0,
    }  # these weights are that version as they are: `trainer run` publishes them
    going_on = replace(chosen, step=batch, policy_version=version, extra=extra)
    saved = save_checkpoint(root, going_on, keep=1 << 30)
    for step, folder in numbered(root):
        if folder != saved and step > chosen.step:
            shutil.rmtree(folder)
    for folder in checkpoints(root)[keep:]:
        shutil.rmtree(folder)


def serves(checkpoint: Checkpoint) -> int:
    """The version whose steps are the newest that a checkpoint holds: its own, or the one that is being made."""
    return checkpoint.policy_version + (1 if unpublished(checkpoint) else 0)


def unpublished(checkpoint: Checkpoint) -> int:
    """Steps that a checkpoint holds after its version."""
    return int(checkpoint.extra.get("unpublished", 0))
