"""Everything that trains (model, objective, optimizer, companions) behind five verbs, on one process or several.

    receive(groups)         what can be done before a batch is full
    step(groups, version)   one step, by the weights of a version or so many steps after it
    weights()               what a policy version holds: bf16, on the CPU
    state()                 what a checkpoint holds
    restore(checkpoint)     go on from one

The leader's verbs are told to the other processes, which do the same in `follow` and throw the results away.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from protocol.errors import UserError
from protocol.rollout import RolloutGroup
from trainer.checkpoint import Checkpoint, random_state, restore_random_state
from trainer.companions import TAUGHT, make_companions, require_supplied
from trainer.config import TrainerConfig, TrainerRun
from trainer.lora import Merged, adapt
from trainer.losses import Objective, make_objective
from trainer.memory import give_back
from trainer.optim import Counters, Optimizer, OptimizerSettings, hidden_matrices
from trainer.precision import round_as_published
from trainer.publish import snapshot
from trainer.sharding import load_whole, shard, whole
from trainer.step import Stepper, StepResult
from trainer.team import Team


class Crew:
    """Made alike on every process of the team. `temperature`: that the rollouts are sampled at."""

    def __init__(self, run: TrainerRun, temperature: float, team: Team | None = None) -> None:
        config = run.trainer
        self._team = team or Team()
        torch.manual_seed(config.seed)
        objective = objective_of(config)
        self.model = load_policy(run.model_path, config)
        load = partial(load_model, dtype=config.dtype, device=config.device)
        companions = make_companions(
            objective,
            self.model,
            initial=partial(load, run.model_path),
            teacher=None if config.teacher is None else partial(load, config.teacher),
            ewma=config.ewma_decay,
        )
        undivided: list[torch.nn.Parameter] = []
        if self._team.size > 1:
            undivided = shard(self.model)
            if companions.ewma is not None:
                companions.ewma.divide()
        self.optimizer = make_optimizer(self.model, config)
        self._stepper = Stepper(
            self.model, objective, self.optimizer, config, temperature, companions, self._team, undivided
        )

    @property
    def counters(self) -> Counters:
        """Of optimizer steps."""
        return self.optimizer.counters

    def step(self, groups: Sequence[RolloutGroup], version: int, unpublished: int = 0) -> StepResult:
        self._team.tell(("step", list(groups), version, unpublished))
        return self._step(groups, version, unpublished)

    def receive(self, groups: Sequence[RolloutGroup]) -> None:
        """Groups of the batch to come, as they become ready."""
        self._stepper.receive(groups)

    def weights(self) -> dict[str, torch.Tensor]:
        self._team.tell(("weights",))
        return published_weights(self.model)

    def state(self) -> dict[str, Any]:
        """Fields of a Checkpoint."""
        self._team.tell(("state",))
        return self._state()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Raises ValueError if the checkpoint is of another model or optimizer."""
        self._team.tell(("restore", checkpoint))
        self._restore(checkpoint)

    def dismiss(self) -> None:
        """The others may go."""
        self._team.tell(("dismiss",))

    def follow(self) -> None:
        """Do what the leader does, until dismissed."""
        while True:
            verb, *arguments = self._team.tell(None)
            if verb == "step":
                self._step(*arguments)
            elif verb == "weights":
                published_weights(self.model)
            elif verb == "state":
                self._state()
            elif verb == "restore":
                self._restore(*arguments)
            else:
                return

    def _step(self, groups: Sequence[RolloutGroup], version: int, unpublished: int) -> StepResult:
        result = self._stepper.step(groups, version, unpublished)
        give_back()
        return result

    def _state(self) -> dict[str, Any]:
        return {
            "weights": whole(self.model.state_dict()),
            "optimizer": whole(self.optimizer.state_dict()),
            "companions": self._stepper.state_dict(),
            "random_state": random_state(),
        }

    def _restore(self, checkpoint: Checkpoint) -> None:
        load_whole(self.model, checkpoint.weights)
        self.optimizer.load_state_dict(checkpoint.optimizer)
        self._stepper.load_state_dict(checkpoint.companions)
        restore_random_state(checkpoint.random_state)
        # Else a batch that can't be trained on would end the trainer again and again, at its first look.
        self.optimizer.counters.skipped_in_a_row = 0


def objective_of(config: TrainerConfig) -> Objective:
    """The run file's objective. Raises UserError that names the choices, or what the run file must supply."""
    objective = make_objective(config.loss, config.loss_params, config.modifiers, config.regularizers)
    require_supplied(objective, teacher=config.teacher is not None, ewma=config.ewma_decay is not None)
    if config.teacher is not None and not objective.needs() & TAUGHT:
        raise UserError('nothing asks for trainer.teacher: leave it out, or choose a loss that learns from one ("opd")')
    return objective


def load_policy(folder: Path, config: TrainerConfig) -> Any:
    """The policy that trains, as the run file wants it: adapters, recomputed activations."""
    model = load_model(folder, config.dtype, config.device)
    if config.lora_rank:
        adapt(model, config.lora_rank, config.lora_alpha or 2.0 * config.lora_rank)
    if config.recompute_activations:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def make_optimizer(model: Any, config: TrainerConfig) -> Optimizer:
    """The policy's optimizer, as the run file wants it."""
    settings = OptimizerSettings(
        kind=config.optimizer,
        lr=config.learning_rate,
        betas=config.betas,
        weight_decay=config.weight_decay,
        warmup_steps=config.warmup_steps,
        max_grad_norm=config.max_grad_norm,
        skip_grad_norm=config.skip_grad_norm,
    )
    return Optimizer(model.parameters(), settings, hidden_matrices(model))


class _Whole:
    """A model whose state is put together, for whatever asks for its state or its head only."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        return whole(self._model.state_dict())

    def get_output_embeddings(self) -> Any:
        return self._model.get_output_embeddings()


def published_weights(model: Any) -> dict[str, torch.Tensor]:
    """What a policy version holds: a bf16 copy, put together, adapters merged in."""
    adapted = any(name.endswith("lora_a") for name, _ in model.named_parameters())
    view: Any = Merged(model) if adapted else _Whole(model)
    return snapshot(view)


def load_model(folder: Any, dtype: str, device: str) -> Any:
    """A policy, from safetensors only and without remote code, with weights that a version can hold.

    Raises UserError if the folder can't be used.
    """
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
    round_as_published(model)
    return model.to(device)
