"""One optimizer step on a batch of groups: advantages, microbatches, loss, update, numbers. No I/O."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from protocol.rollout import RolloutGroup
from trainer.advantage import Selection, make_advantage, select
from trainer.batching import Microbatch, pack, sequences_of
from trainer.config import TrainerConfig
from trainer.logprobs import completion_logprobs
from trainer.losses import Loss
from trainer.metrics import StepTokens
from trainer.optim import Optimizer, StepReport


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did. `trained`: ids of the rollouts that took part; `dropped`: numbers of the others, by reason."""

    report: StepReport | None
    metrics: dict[str, float]
    trained: tuple[str, ...]
    dropped: dict[str, int]


class Stepper:
    """Holds model, loss and optimizer, and steps. `temperature`: that the rollouts were sampled at."""

    def __init__(self, model: Any, loss: Loss, optimizer: Optimizer, config: TrainerConfig, temperature: float) -> None:
        self._model = model
        self._loss = loss
        self._optimizer = optimizer
        self._config = config
        self._temperature = temperature
        self._advantage = make_advantage(config.advantage)

    def step(self, groups: Sequence[RolloutGroup], trainer_version: int) -> StepResult:
        """Train on a batch. A batch without any advantage changes nothing, and is reported as such."""
        begun = time.perf_counter()
        # Groups come in the order in which they became ready; a fixed order makes a replay after a crash exact.
        ordered = sorted(groups, key=lambda group: group.group_id)
        selection = select(ordered, self._advantage)
        microbatches = self._microbatches(selection, trainer_version)
        metrics = StepTokens()
        report = self._update(microbatches, metrics) if microbatches else None
        numbers = {**_rewards(ordered), **metrics.metrics(), "incomplete_groups": float(selection.incomplete_groups)}
        if report is not None:
            numbers |= {"grad_norm": report.grad_norm, "learning_rate": report.lr, "applied": float(report.applied)}
        numbers["step_seconds"] = time.perf_counter() - begun
        applied = report is not None and report.applied
        trained = [item.rollout_id for group, _ in selection.groups for item in group.rollouts] if applied else []
        dropped = {reason: len(ids) for reason, ids in selection.dropped.items()}
        if report is not None and not applied:
            dropped["skipped_step"] = sum(len(group.rollouts) for group, _ in selection.groups)
        return StepResult(report, numbers, tuple(trained), dropped)

    def _microbatches(self, selection: Selection, trainer_version: int) -> list[Microbatch]:
        sequences = [
            sequence
            for group, advantages in selection.groups
            for sequence in sequences_of(group, advantages, trainer_version)
        ]
        return pack(sequences, token_budget=self._config.token_budget, share_prompts=self._config.share_prompts)

    def _update(self, microbatches: list[Microbatch], metrics: StepTokens) -> StepReport:
        """Accumulate gradients over all microbatches under one denominator, then update."""
        self._model.train()
        denominator = sum(self._loss.denominator(batch.mask_BT, batch.staleness_BT) for batch in microbatches)
        for cpu_batch in microbatches:
            batch = cpu_batch.to(self._config.device)
            new_BT, entropy_BT = completion_logprobs(self._model, batch, self._temperature)
            claimed = batch.loss_inputs(new_BT)
            inputs = claimed.with_behaviour(self._config.behaviour_tolerance)
            output = self._loss(inputs, denominator)
            output.loss.backward()
            metrics.add(claimed, output, entropy_BT)
        return self._optimizer.step()


def _rewards(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Mean reward over all rollouts of the batch (also those of dropped groups), and per environment."""
    by_environment: dict[str, list[float]] = {}
    for group in groups:
        by_environment.setdefault(group.environment, []).extend(item.reward for item in group.rollouts)
    rewards = [reward for each in by_environment.values() for reward in each]
    numbers = {f"reward_mean/{name}": fmean(each) for name, each in by_environment.items() if each}
    lengths = [len(item.rollout.token_ids) for group in groups for item in group.rollouts]
    return {
        "reward_mean": fmean(rewards) if rewards else 0.0,
        "completion_tokens_mean": fmean(lengths) if lengths else 0.0,
        "rollouts": float(len(rewards)),
        **numbers,
    }
