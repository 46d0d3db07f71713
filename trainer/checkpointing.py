"""Checkpoints written beside the training: a step waits for the copy of the state, never for the disk.

    begin    copies the state, waits for the write before it, and starts this one
    finish   waits for what is being written, and raises what it raised

One write is in flight at most, so that they end in order and memory holds one copy. What depends on a checkpoint (the
acknowledgement of its batches) runs after it is whole on the disk.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import torch

from trainer.checkpoint import Checkpoint, save_checkpoint


class Checkpointer:
    """Writes below `root` and keeps the newest `keep`."""

    def __init__(self, root: Path, keep: int) -> None:
        self._root, self._keep = root, keep
        self._running: asyncio.Task[None] | None = None

    async def begin(self, checkpoint: Checkpoint, then: Callable[[], Awaitable[object]]) -> None:
        """Write in the background, and call `then` when it is whole. Raises what the write before this one raised."""
        taken = await asyncio.to_thread(own_copy, checkpoint)
        await self.finish()
        self._running = asyncio.create_task(self._write(taken, then), name=f"checkpoint {checkpoint.step}")

    async def finish(self) -> None:
        """Wait for what is being written, if anything."""
        running, self._running = self._running, None
        if running is not None:
            await running

    async def settle(self) -> None:
        """The trainer is failing: let the write come to its end, whatever that is."""
        running, self._running = self._running, None
        if running is not None:
            await asyncio.gather(running, return_exceptions=True)

    async def _write(self, checkpoint: Checkpoint, then: Callable[[], Awaitable[object]]) -> None:
        await asyncio.to_thread(save_checkpoint, self._root, checkpoint, self._keep)
        await then()


def own_copy(checkpoint: Checkpoint) -> Checkpoint:
    """The same on the CPU, sharing nothing with tensors that training goes on to change."""
    weights = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in checkpoint.weights.items()}
    with torch.no_grad():
        return replace(
            checkpoint,
            weights=weights,
            optimizer=copy.deepcopy(checkpoint.optimizer),
            companions=copy.deepcopy(checkpoint.companions),
        )
