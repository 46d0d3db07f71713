"""The trainer's loop, and what each part waits for.

    pull        consumes ready groups of this batch      waits for the coordinator (long poll)
    step        consumes a full batch                    waits for nothing
    checkpoint  consumes a copy of the state             in the background; then acknowledges its batches
    publish     consumes a bf16 snapshot of the weights  in the background, while the next batch is pulled

A step makes one batch's updates; every `publish_every` steps make a policy version. A crash between checkpoints replays
the batches since the last one: the coordinator serves them again, unchanged, so that the same weights come out; versions
that were announced before the crash are compared by digest and not published twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from coordinator.client import RunState, TrainerClient
from protocol.errors import OurFault, UserError
from protocol.rollout import RolloutGroup
from protocol.signing import Identity
from trainer.alarms import Watch
from trainer.checkpoint import Checkpoint, load_latest
from trainer.checkpointing import Checkpointer
from trainer.config import TrainerRun
from trainer.crew import Crew
from trainer.periodic_evaluation import PeriodicEvaluation
from trainer.publish import Publisher
from trainer.step import StepResult
from trainer.team import Team

log = logging.getLogger(__name__)

_PULL_WAIT_S = 10.0


@dataclass(slots=True)
class _Position:
    """Batches trained on, the version that these weights are (or began as), and the newest version announced.

    `unpublished`: steps since that version.
    """

    batch: int
    version: int
    head: int
    unpublished: int = 0


class Trainer:
    """Trains until the budget of versions is published or `stop` is set."""

    def __init__(
        self,
        run: TrainerRun,
        client: TrainerClient,
        identity: Identity,
        stop: asyncio.Event,
        team: Team | None = None,
        evaluation: PeriodicEvaluation | None = None,
    ) -> None:
        self._run = run
        self._team = team or Team()
        self._evaluation = evaluation
        self._config = run.trainer
        self._model_path = run.model_path
        self._client = client
        self._identity = identity
        self._stop = stop
        self._watch = Watch(self._config.alarms())
        self._saved = 0  # batches that the newest checkpoint holds, or is about to
        self._checkpointer = Checkpointer(self._config.checkpoints, self._config.keep_checkpoints)

    async def run(self, on_step: Callable[[int, StepResult], None] = lambda batch, result: None) -> None:
        """Train. Raises OurFault if steps keep failing, UserError if the run can't be resumed from here."""
        state = await self._client.state()
        self._team.tell(("temperature", state.temperature))
        crew = await asyncio.to_thread(Crew, self._run, state.temperature, self._team)
        await self._train(state, crew, on_step)
        # After a failure the others may be in the middle of a collective: torchrun ends them then.
        crew.dismiss()

    async def _train(self, state: RunState, crew: Crew, on_step: Callable[[int, StepResult], None]) -> None:
        publisher = self._publisher(state)
        try:
            position = await self._begin(state, crew, publisher)
            log.info(
                "version %d is published; waiting for %d groups of rollouts",
                position.version,
                state.groups_per_batch,
                extra={"action": "ready"},
            )
            while position.version < self._config.versions and not self._stop.is_set():
                groups = await self._pull(position, state.groups_per_batch, crew)
                if groups is None:
                    break
                result = await asyncio.to_thread(crew.step, groups, position.version, position.unpublished)
                alarms = self._watch.look(result.metrics)
                if crew.counters.skipped_in_a_row >= self._config.max_skipped_steps:
                    await self._give_up(position, result, crew, alarms)
                await self._after_step(position, result, crew, publisher, alarms)
                on_step(position.batch, result)
            await publisher.finish()
            await self._checkpoint(position, crew)
            await self._checkpointer.finish()
        finally:
            await self._checkpointer.settle()
            await publisher.settle()

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

    async def _begin(self, state: RunState, crew: Crew, publisher: Publisher) -> _Position:
        """Resume from the newest checkpoint, or begin with version 0."""
        batch, version, unpublished = await asyncio.to_thread(self._restore, crew)
        if state.next_batch > batch:
            raise UserError(
                f"{state.next_batch} batches are acknowledged, but the newest checkpoint in {self._config.checkpoints} "
                f"holds {batch}: restore a newer one"
            )
        head = -1 if state.head_version is None else state.head_version
        position = _Position(batch, version, head, unpublished)
        if batch:
            log.info("resumed after batch %d at version %d", batch, version, extra={"action": "resume"})
            await self._client.acknowledge(batch - 1)
        if position.version >= position.head and not unpublished:
            # Also after a crash between checkpoint, announcement and origin: each of them takes the same version again.
            await publisher.publish(await asyncio.to_thread(crew.weights), position.version)
            position.head = position.version
        return position

    def _restore(self, crew: Crew) -> tuple[int, int, int]:
        """Load the newest whole checkpoint: (batches it holds, its version, steps since that), zeros if there is none."""
        found = load_latest(self._config.checkpoints)
        if found is None:
            return 0, 0, 0
        checkpoint, damaged = found
        for sentence in damaged:
            log.warning("%s; using an older checkpoint", sentence, extra={"action": "damaged_checkpoint"})
        try:
            crew.restore(checkpoint)
        except (ValueError, KeyError) as error:
            raise UserError(
                f"the checkpoint in {self._config.checkpoints} is of another model or optimizer ({error}): put [model] and "
                "[trainer] back as they were, or choose another folder for checkpoints"
            ) from error
        self._saved = checkpoint.step
        self._watch.entropies[:] = checkpoint.extra.get("first_entropies", [])
        return checkpoint.step, checkpoint.policy_version, int(checkpoint.extra.get("unpublished", 0))

    async def _pull(self, position: _Position, wanted: int, crew: Crew) -> list[RolloutGroup] | None:
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
            if fresh:
                await asyncio.to_thread(crew.receive, fresh)
        return list(groups.values())

    async def _give_up(self, position: _Position, result: StepResult, crew: Crew, alarms: dict[str, str]) -> None:
        """Too many skipped steps in a row end the trainer, with everything before the last of them in a checkpoint."""
        await self._checkpoint(position, crew)
        await self._checkpointer.finish()
        why = (
            f"{crew.counters.skipped_in_a_row} steps in a row had gradients that are not finite or too large: look at "
            "the loss's metrics, lower the learning rate, and resume from the last checkpoint"
        )
        log.error("%s", why, extra={"action": "alarm", "alarm": "gave_up"})
        await self._report(position.batch, position.version, result, crew, {**alarms, "gave_up": why})
        raise OurFault(why)

    async def _report(
        self, batch: int, trained_by: int, result: StepResult, crew: Crew, alarms: dict[str, str]
    ) -> None:
        await self._client.report(
            batch=batch,
            trainer_version=trained_by,
            optimizer_steps=crew.counters.steps,
            metrics=result.metrics,
            dropped=result.dropped,
            trained=result.trained,
            alarms=alarms,
        )

    async def _after_step(
        self, position: _Position, result: StepResult, crew: Crew, publisher: Publisher, alarms: dict[str, str]
    ) -> None:
        trained_by = position.version
        position.batch += 1
        position.unpublished += 1
        if position.unpublished >= self._config.publish_every:
            position.version += 1
            position.unpublished = 0
            weights = await asyncio.to_thread(crew.weights)
            await self._publish(position, weights, publisher)
            if self._evaluation is not None and self._evaluation.due(position.version):
                await self._evaluation.begin(weights, position.version)
        if self._evaluation is not None:
            result.metrics.update(self._evaluation.collect())
        await self._report(position.batch - 1, trained_by, result, crew, alarms)
        if position.batch % self._config.checkpoint_every == 0:
            if position.unpublished:
                # From here these weights can't be published again as that version: it must be out before.
                await publisher.finish()
            await self._checkpoint(position, crew)

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

    async def _checkpoint(self, position: _Position, crew: Crew) -> None:
        """Save in the background, then acknowledge: a batch stays re-servable until a checkpoint holds it."""
        if position.batch == 0 or position.batch == self._saved:
            return
        state = await asyncio.to_thread(crew.state)
        checkpoint = Checkpoint(
            step=position.batch,
            policy_version=position.version,
            extra={"unpublished": position.unpublished, "first_entropies": list(self._watch.entropies)},
            **state,
        )
        self._saved = position.batch
        await self._checkpointer.begin(checkpoint, partial(self._client.acknowledge, position.batch - 1))
