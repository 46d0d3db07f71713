"""The trainer's loop, and what each part waits for.

    pull        consumes ready groups of this batch      waits for the coordinator (long poll)
    step        consumes a full batch                    waits for nothing
    checkpoint  consumes the state after a step          every `checkpoint_every` steps; then acknowledges its batches
    publish     consumes a bf16 snapshot of the weights  in the background, while the next batch is pulled

Batch b is trained by the weights of version b. A crash between checkpoints replays the batches since the last one: the
coordinator serves them again, unchanged, so that the same weights come out; versions that were announced before the crash
are compared by digest and not published twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from coordinator.client import RunState, TrainerClient
from protocol.errors import OurFault, UserError
from protocol.rollout import RolloutGroup
from protocol.signing import Identity
from trainer.checkpoint import Checkpoint, load_latest, random_state, restore_random_state, save_checkpoint
from trainer.config import TrainerRun
from trainer.losses import make_loss
from trainer.optim import Optimizer, OptimizerSettings
from trainer.publish import Publisher, snapshot
from trainer.step import Stepper, StepResult

log = logging.getLogger(__name__)

_PULL_WAIT_S = 10.0


@dataclass(slots=True)
class _Position:
    """Batches trained on, the version that these weights are, and the newest version announced."""

    batch: int
    version: int
    head: int


class Trainer:
    """Trains until the budget of versions is published or `stop` is set."""

    def __init__(self, run: TrainerRun, client: TrainerClient, identity: Identity, stop: asyncio.Event) -> None:
        self._config = run.trainer
        self._model_path = run.model_path
        self._client = client
        self._identity = identity
        self._stop = stop
        self._saved = 0  # batches that the newest checkpoint holds

    async def run(self, on_step: Callable[[int, StepResult], None] = lambda batch, result: None) -> None:
        """Train. Raises OurFault if steps keep failing, UserError if the run can't be resumed from here."""
        torch.manual_seed(self._config.seed)
        model = await asyncio.to_thread(load_model, self._model_path, self._config.dtype, self._config.device)
        optimizer = Optimizer(
            model.parameters(),
            OptimizerSettings(
                lr=self._config.learning_rate,
                betas=self._config.betas,
                weight_decay=self._config.weight_decay,
                warmup_steps=self._config.warmup_steps,
                max_grad_norm=self._config.max_grad_norm,
            ),
        )
        loss = make_loss(self._config.loss, **self._config.loss_params)
        state = await self._client.state()
        publisher = self._publisher(state)
        position = await self._begin(state, model, optimizer, publisher)
        log.info(
            "version %d is published; waiting for %d groups of rollouts",
            position.version,
            state.groups_per_batch,
            extra={"action": "ready"},
        )
        stepper = Stepper(model, loss, optimizer, self._config, state.temperature)
        try:
            while position.version < self._config.versions and not self._stop.is_set():
                groups = await self._pull(position, state.groups_per_batch)
                if groups is None:
                    break
                result = await asyncio.to_thread(stepper.step, groups, position.version)
                self._require_healthy(optimizer)
                await self._after_step(position, result, model, optimizer, publisher)
                on_step(position.batch, result)
            await publisher.finish()
        finally:
            await publisher.settle()
        await self._checkpoint(position, model, optimizer)

    def _publisher(self, state: RunState) -> Publisher:
        return Publisher(
            self._client,
            self._identity,
            run_id=state.run_id,
            model_folder=self._model_path,
            origin=self._config.origin,
            origin_data=self._config.origin_data,
            shard_bytes=self._config.shard_bytes,
            full_every=self._config.full_every,
            packed=self._config.packed,
        )

    async def _begin(self, state: RunState, model: Any, optimizer: Optimizer, publisher: Publisher) -> _Position:
        """Resume from the newest checkpoint, or begin with version 0."""
        batch, version = await asyncio.to_thread(self._restore, model, optimizer)
        if state.next_batch > batch:
            raise UserError(
                f"{state.next_batch} batches are acknowledged, but the newest checkpoint in {self._config.checkpoints} "
                f"holds {batch}: restore a newer one"
            )
        position = _Position(batch, version, -1 if state.head_version is None else state.head_version)
        if batch:
            log.info("resumed after batch %d at version %d", batch, version, extra={"action": "resume"})
            await self._client.acknowledge(batch - 1)
        if position.version >= position.head:
            # Also after a crash between checkpoint, announcement and origin: each of them takes the same version again.
            await publisher.publish(await asyncio.to_thread(snapshot, model), position.version)
            position.head = position.version
        return position

    def _restore(self, model: Any, optimizer: Optimizer) -> tuple[int, int]:
        """Load the newest whole checkpoint into model and optimizer: (batches it holds, its version), (0, 0) if none."""
        found = load_latest(self._config.checkpoints)
        if found is None:
            return 0, 0
        checkpoint, damaged = found
        for sentence in damaged:
            log.warning("%s; using an older checkpoint", sentence, extra={"action": "damaged_checkpoint"})
        model.load_state_dict(checkpoint.weights)
        optimizer.load_state_dict(checkpoint.optimizer)
        restore_random_state(checkpoint.random_state)
        return checkpoint.step, checkpoint.policy_version

    async def _pull(self, position: _Position, wanted: int) -> list[RolloutGroup] | None:
        """A batch of groups, taken as they become ready; None if told to stop."""
        groups: dict[str, RolloutGroup] = {}
        while len(groups) < wanted:
            if self._stop.is_set():
                return None
            fresh = await self._client.pull(
                batch=position.batch,
                trainer_version=position.version,
                held=list(groups),
                max_groups=wanted,
                wait_s=_PULL_WAIT_S,
            )
            groups.update((group.group_id, group) for group in fresh)
        return list(groups.values())

    def _require_healthy(self, optimizer: Optimizer) -> None:
        """Skipped steps are counted; too many in a row end the trainer, with the last good checkpoint on disk."""
        if optimizer.counters.skipped_in_a_row >= self._config.max_skipped_steps:
            raise OurFault(
                f"{optimizer.counters.skipped_in_a_row} steps in a row had gradients that are not finite: look at the "
                "loss's metrics, lower the learning rate, and resume from the last checkpoint"
            )

    async def _after_step(
        self, position: _Position, result: StepResult, model: Any, optimizer: Optimizer, publisher: Publisher
    ) -> None:
        trained_by = position.version
        position.batch += 1
        position.version += 1
        await self._publish(position, await asyncio.to_thread(snapshot, model), publisher)
        await self._client.report(
            batch=position.batch - 1,
            trainer_version=trained_by,
            optimizer_steps=optimizer.counters.steps,
            metrics=result.metrics,
            dropped=result.dropped,
            trained=result.trained,
        )
        if position.batch % self._config.checkpoint_every == 0:
            await self._checkpoint(position, model, optimizer)

    async def _publish(self, position: _Position, state: dict[str, torch.Tensor], publisher: Publisher) -> None:
        """Publish, unless this version was announced before a crash; then the replay must have come out the same."""
        if position.version > position.head:
            await publisher.begin(state, position.version)
            position.head = position.version
            return
        known = (await self._client.state()).head_digest
        if position.version == position.head and await publisher.digest_of(state, position.version) != known:
            # Not bitwise reproducible here: what workers hold as `head` keeps its number, ours becomes the next.
            log.warning(
                "the replay came out with other weights; publishing them as the next version",
                extra={"action": "replay"},
            )
            position.version = position.head + 1
            await publisher.begin(state, position.version)
            position.head = position.version
        elif position.version == position.head:
            await publisher.publish(state, position.version)  # the origin may have missed it

    async def _checkpoint(self, position: _Position, model: Any, optimizer: Optimizer) -> None:
        """Save, then acknowledge: a batch stays re-servable until a checkpoint holds it."""
        if position.batch == 0 or position.batch == self._saved:
            return
        checkpoint = Checkpoint(
            step=position.batch,
            policy_version=position.version,
            weights=model.state_dict(),
            optimizer=optimizer.state_dict(),
            random_state=random_state(),
        )
        await asyncio.to_thread(save_checkpoint, self._config.checkpoints, checkpoint, self._config.keep_checkpoints)
        self._saved = position.batch
        await self._client.acknowledge(position.batch - 1)


def load_model(folder: Any, dtype: str, device: str) -> Any:
    """The initial policy, from safetensors only and without remote code. Raises UserError if the folder can't be used."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation="sdpa",
        )
    except (OSError, ValueError) as error:
        raise UserError(f"model.path: cannot load {folder}: {str(error).splitlines()[0]}") from error
    return model.to(device)
