"""One step on a batch of groups: advantages, microbatches, loss, updates, numbers. No I/O.

    groups ─ select ─▶ chosen ─ pack ─▶ microbatches ─ prepare ─▶ + extras, refined advantages ─ update ─▶ weights

`prepare` is skipped where the objective needs nothing but the batch. A step has one optimizer update, or
`updates_per_batch` of them on disjoint parts of the batch. It knows nothing of versions: that `publish_every` steps make one is
`trainer.loop`'s.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch

from protocol.rollout import RolloutGroup
from trainer.advantage import Advantage, Chosen, GroupAdvantage, LengthBudget, RawReward, Selection, select
from trainer.baseline import MovingBaseline
from trainer.batching import Microbatch, pack, sequences_of
from trainer.companions import Companions, Extras
from trainer.config import TrainerConfig
from trainer.critic import Critic
from trainer.filters import Filters
from trainer.logprobs import hidden_states, score
from trainer.losses import Alternatives, Loss, LossInputs, Need, Objective
from trainer.losses.inputs import log_ratio
from trainer.losses.vcpo import Vcpo
from trainer.metrics import StepTokens
from trainer.optim import Optimizer, StepReport
from trainer.refine import Movement, by_key, critic_advantages, minimal_variance_advantages, movements, with_advantages
from trainer.sharding import average_gradients
from trainer.teaching import TeacherStage
from trainer.team import Team


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did. `trained`: ids of the rollouts that took part; `dropped`: numbers of the others, by reason.

    `report`: of the last update, None if there was none.
    """

    report: StepReport | None
    metrics: dict[str, float]
    trained: tuple[str, ...]
    dropped: dict[str, int]


@dataclass(slots=True)
class _Part:
    """What one update is made on. `chosen`: groups with the key of their first completion.

    `microbatches` are this process's; where `counts` is False, one is computed only for the others to go on.
    `denominator` and `trusted` (whether every completion has trusted log-probs): over all processes.
    """

    chosen: list[tuple[int, Chosen]]
    microbatches: list[Microbatch] = field(default_factory=list)
    counts: list[bool] = field(default_factory=list)
    denominator: float = 0.0
    trusted: bool = True
    extras: list[Extras] = field(default_factory=list)


class Stepper:
    """Holds model, objective and optimizer, and steps. `temperature`: that the rollouts were sampled at."""

    def __init__(
        self,
        model: Any,
        loss: Loss | Objective,
        optimizer: Optimizer,
        config: TrainerConfig,
        temperature: float,
        companions: Companions | None = None,
        team: Team | None = None,
        undivided: Sequence[torch.nn.Parameter] = (),
    ) -> None:
        self._model = model
        self._objective = loss if isinstance(loss, Objective) else Objective(loss)
        self._optimizer = optimizer
        self._config = config
        self._temperature = temperature
        self._companions = companions or Companions()
        self._team = team or Team()
        self._undivided = list(undivided)
        self._filters = Filters(config.keep_zero_advantage, config.pass_rate, config.mask_overlong)
        self._budget = LengthBudget(config.length_target, config.length_penalty)
        self._advantage = _advantage(config) if self._objective.loss.uses_advantages() else RawReward()
        self._critic = _critic(config, model)
        self._teaching = self._teacher_stage(config, temperature)
        self._least_variance = any(isinstance(part, Vcpo) and part.baseline for part in self._objective.modifiers)

    def step(self, groups: Sequence[RolloutGroup], trainer_version: int, unpublished: int = 0) -> StepResult:
        """Train on a batch. A batch without any advantage changes nothing, and is reported as such.

        `unpublished`: steps since the weights were `trainer_version`.
        """
        begun = time.perf_counter()
        # Groups come in the order in which they became ready; a fixed order makes a replay after a crash exact.
        ordered = sorted(groups, key=lambda group: group.group_id)
        selection = select(ordered, self._advantage, self._filters, self._budget)
        parts = self._parts(selection, trainer_version)
        numbers = {**_rewards(ordered), "incomplete_groups": float(selection.incomplete_groups)}
        tokens, report = StepTokens(), None
        applied: list[str] = []
        numbers |= self._prepare(parts)
        for part in parts:
            report = self._update(part, tokens, moved=bool(unpublished or applied))
            if report.applied:
                applied += [item.rollout_id for _, chosen in part.chosen for item in chosen.trained]
                if self._companions.ewma is not None:
                    self._companions.ewma.update(self._model)
        tokens = StepTokens([part for own in self._team.gather(tokens.parts) for part in own])
        numbers |= tokens.metrics() | _of_report(report) | _dropped_lengths(selection)
        numbers["step_seconds"] = time.perf_counter() - begun
        dropped = {reason: len(items) for reason, items in selection.dropped.items()}
        skipped = sum(len(chosen.trained) for part in parts for _, chosen in part.chosen) - len(applied)
        if skipped:
            dropped["skipped_step"] = skipped
        return StepResult(report, numbers, tuple(applied), dropped)

    def receive(self, groups: Sequence[RolloutGroup]) -> None:
        """Groups of the batch to come, as they become ready: what can be done before it is full is done now."""
        if self._teaching is not None:
            self._teaching.receive(groups)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold besides weights and optimizer; empty where nothing needs it."""
        state: dict[str, Any] = {}
        if isinstance(self._advantage, MovingBaseline):
            state["baseline"] = dict(self._advantage.averages)
        if self._critic is not None:
            state["critic"] = self._critic.state_dict()
        if self._companions.ewma is not None:
            state["ewma"] = self._companions.ewma.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`; what it lacks (another objective wrote it) begins anew."""
        if isinstance(self._advantage, MovingBaseline):
            self._advantage.averages = dict(state.get("baseline", {}))
        if self._critic is not None and "critic" in state:
            self._critic.load_state_dict(state["critic"])
        if self._companions.ewma is not None and "ewma" in state:
            self._companions.ewma.load_state_dict(state["ewma"])
        elif self._companions.ewma is not None:
            self._companions.ewma.begin(self._model)

    def _teacher_stage(self, config: TrainerConfig, temperature: float) -> TeacherStage | None:
        """Only where the sampled tokens' scores are all that is asked of the teacher, and one process does it."""
        others = {Need.DRAWS, Need.TOP_K, Need.TEACHER_DRAWS} & self._objective.needs()
        if self._companions.teacher is None or others or self._team.size > 1:
            return None
        return TeacherStage(
            self._companions.teacher,
            temperature=temperature,
            token_budget=config.token_budget,
            share_prompts=config.share_prompts,
            device=config.device,
        )

    def _parts(self, selection: Selection, trainer_version: int) -> list[_Part]:
        """The chosen groups, dealt to as many parts as there are updates, and packed."""
        parts = [_Part([]) for _ in range(self._config.updates_per_batch)]
        key = 0
        for number, chosen in enumerate(selection.groups):
            parts[number % len(parts)].chosen.append((key, chosen))
            key += len(chosen.advantages)
        for part in parts:
            sequences = [
                sequence
                for first, chosen in part.chosen
                for sequence in sequences_of(chosen.group, chosen.advantages, trainer_version, first)
            ]
            packed = pack(sequences, token_budget=self._config.token_budget, share_prompts=self._config.share_prompts)
            part.denominator = sum(self._objective.denominator(each.mask_BT, each.staleness_BT) for each in packed)
            part.trusted = all(bool(each.has_old_B.all()) for each in packed)
            for microbatch, counts in self._team.part(packed):
                part.microbatches.append(microbatch)
                part.counts.append(counts)
        return [part for part in parts if part.microbatches]

    def _prepare(self, parts: list[_Part]) -> dict[str, float]:
        """Everything of the step-start policy that the updates need, before the first of them."""
        self._model.train()
        ewma = self._config.old_logprobs == "ewma"
        prox = self._least_variance or (len(parts) > 1 and self._compares_with_start(parts))
        wanted = prox or ewma or self._objective.needs() - {Need.ENTROPY, Need.PROX}
        for part in parts:
            for number, batch in enumerate(part.microbatches):
                batch = part.microbatches[number] = batch.to(self._config.device)
                part.extras.append(self._extras(part, batch, prox=prox, ewma=ewma) if wanted else Extras())
        if self._teaching is not None:
            self._teaching.forget()
        if self._least_variance:
            self._use_least_variance(parts)
        return self._use_critic(parts) if self._critic is not None and parts else {}

    def _compares_with_start(self, parts: list[_Part]) -> bool:
        """Whether anything asks for the step-start policy's log-probs; while a step is at its first update, it is `new`."""
        snapshot = self._config.old_logprobs == "snapshot"
        return Need.PROX in self._objective.needs() or snapshot or not all(part.trusted for part in parts)

    def _extras(self, part: _Part, batch: Microbatch, *, prox: bool, ewma: bool) -> Extras:
        taught_BT = None
        if self._teaching is not None:
            names = {
                first + place: item.rollout_id
                for first, chosen in part.chosen
                for place, item in enumerate(chosen.group.rollouts)
            }
            taught_BT = self._teaching.take(batch, names)
        return self._companions.extras(
            self._model, batch, self._objective, self._temperature, prox=prox, ewma=ewma, taught_BT=taught_BT
        )

    def _use_least_variance(self, parts: list[_Part]) -> None:
        for part in parts:
            moved: dict[int, Movement] = {}
            for batch, extras in zip(part.microbatches, part.extras, strict=True):
                assert extras.prox_BT is not None
                inputs = self._inputs(batch, extras, extras.prox_BT)
                moved |= movements(batch, extras.prox_BT, inputs.behaviour_BT)
            for theirs in self._team.gather(moved):
                moved |= theirs  # a group's completions may be on several processes
            advantages = minimal_variance_advantages(part.chosen, moved)
            part.microbatches = [with_advantages(batch, advantages) for batch in part.microbatches]

    @torch.no_grad()
    def _states(self, batch: Microbatch) -> torch.Tensor:
        """[N, D] hidden states from which the trained tokens are predicted, in the order of the mask."""
        return hidden_states(self._model, batch).flatten(0, 1)[batch.source_BT[batch.mask_BT]]

    def _use_critic(self, parts: list[_Part]) -> dict[str, float]:
        """Advantages by GAE, and then the critic's own updates."""
        assert self._critic is not None
        features, targets = [], []
        for part in parts:
            for number, batch in enumerate(part.microbatches):
                hidden_ND = self._states(batch)
                value_N = self._critic.values(hidden_ND)
                values_BT = torch.zeros_like(batch.advantage_BT).masked_scatter(batch.mask_BT, value_N)
                advantages = critic_advantages(part.chosen, by_key(batch, values_BT), self._config.critic_lambda)
                part.microbatches[number] = refined = with_advantages(batch, advantages)
                count = len(hidden_ND) if part.counts[number] else 0
                features.append(hidden_ND[:count])
                targets.append((refined.advantage_BT[batch.mask_BT] + value_N)[:count])
        return self._critic.fit(torch.cat(features), torch.cat(targets), self._team)

    def _update(self, part: _Part, tokens: StepTokens, *, moved: bool) -> StepReport:
        """Accumulate gradients over all microbatches under one denominator, then update.

        `moved`: the weights are no longer those of the version.
        """
        needs = self._objective.needs()
        log_weights: list[float] = []
        for batch, extras, counts in zip(part.microbatches, part.extras, part.counts, strict=True):
            scores = score(
                self._model,
                batch,
                self._temperature,
                entropy_gradient=Need.ENTROPY in needs,
                others_BTM=extras.ids_BTM,
            )
            inputs = self._inputs(batch, extras, scores.logprob_BT)
            if extras.ids_BTM is not None and extras.sampler_BTM is not None and scores.others_BTM is not None:
                others = Alternatives(scores.others_BTM, extras.sampler_BTM, extras.teacher_BTM)
                inputs = replace(inputs, others=others)
            inputs = replace(inputs, entropy_BT=scores.entropy_BT)
            output = self._objective(inputs, part.denominator)
            # Gradients are averaged over the processes, and the sum is wanted.
            (output.loss * (self._team.size if counts else 0.0)).backward()
            if not counts:
                continue
            trusted = batch.loss_inputs(scores.logprob_BT, extras.prox_BT)
            tokens.add(trusted, output, scores.entropy_BT, inputs.behaviour_BT, moved=moved)
            log_weights += _log_weights(inputs)
        if self._undivided:
            average_gradients(self._undivided, self._team.size)
        everybodys = [weight for own in self._team.gather(log_weights) for weight in own]
        return self._optimizer.step(self._objective.rate_scale(everybodys))

    def _inputs(self, batch: Microbatch, extras: Extras, new_BT: torch.Tensor) -> LossInputs:
        """Inputs of the objective: `old` as the run chooses it, the worker's claims confined to it."""
        start_BT = new_BT.detach() if extras.prox_BT is None else extras.prox_BT
        replacing = {"trusted": None, "snapshot": start_BT, "ewma": extras.ewma_BT}[self._config.old_logprobs]
        inputs = batch.loss_inputs(new_BT, extras.prox_BT, replacing)
        return replace(
            inputs.with_behaviour(self._config.behaviour_tolerance),
            prox_BT=start_BT if Need.PROX in self._objective.needs() else None,
            ewma_BT=extras.ewma_BT,
            reference_BT=extras.reference_BT,
            teacher_BT=extras.teacher_BT,
        )


def _advantage(config: TrainerConfig) -> Advantage:
    if config.advantage == "single":
        return MovingBaseline(config.baseline_decay)
    return RawReward() if config.advantage == "critic" else GroupAdvantage(config.advantage)


def _critic(config: TrainerConfig, model: Any) -> Critic | None:
    if config.advantage != "critic":
        return None
    return Critic(
        model.get_output_embeddings().weight.shape[1],
        learning_rate=config.critic_learning_rate,
        updates=config.critic_updates,
        device=config.device,
    )


def _log_weights(inputs: LossInputs) -> list[float]:
    """Each completion's Σ (new − behaviour), those without a token that counts left out."""
    moved_BT = torch.where(inputs.mask_BT, log_ratio(inputs.new_BT.detach(), inputs.behaviour_BT), 0.0)
    return moved_BT.double().sum(dim=1)[inputs.mask_BT.any(dim=1)].tolist()


def _of_report(report: StepReport | None) -> dict[str, float]:
    if report is None:
        return {}
    return {"grad_norm": report.grad_norm, "learning_rate": report.lr, "applied": float(report.applied)}


def _dropped_lengths(selection: Selection) -> dict[str, float]:
    """Mean length in tokens of what was dropped, by reason: dropping the long ones would bias against long answers."""
    return {
        f"dropped_tokens_mean/{reason}": fmean(item.rollout.model_tokens for item in items)
        for reason, items in selection.dropped.items()
        if items
    }


def _rewards(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Mean reward over all rollouts of the batch (also those of dropped groups), and per environment."""
    by_environment: dict[str, list[float]] = {}
    for group in groups:
        by_environment.setdefault(group.environment, []).extend(item.reward for item in group.rollouts)
    rewards = [reward for each in by_environment.values() for reward in each]
    numbers = {f"reward_mean/{name}": fmean(each) for name, each in by_environment.items() if each}
    lengths = [item.rollout.model_tokens for group in groups for item in group.rollouts]
    return {
        "reward_mean": fmean(rewards) if rewards else 0.0,
        "completion_tokens_mean": fmean(lengths) if lengths else 0.0,
        "rollouts": float(len(rewards)),
        **numbers,
    }
