"""Policies besides the one that trains: the initial policy, a teacher, a moving average of the weights.

None of them ever has a gradient. Which ones there must be follows from the objective (`Need`), and is settled before the
first step: what a run file doesn't supply is the user's to add then, not a surprise in the first batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from protocol.errors import UserError
from trainer.batching import Microbatch
from trainer.logprobs import choose_tokens, score
from trainer.losses import Need, Objective
from trainer.sharding import divided_like, own_part, shard, whole

TAUGHT = {Need.TEACHER, Need.TEACHER_DRAWS}  # asked for by what learns from a teacher
_CHOSEN = (Need.DRAWS, Need.TOP_K, Need.TEACHER_DRAWS)


class Ewma:
    """Exponentially weighted average of a model's weights: average ← decay · average + (1 − decay) · weights.

    Averaged in float32, whatever the model's dtype: in bfloat16 an update is mostly less than half a unit in the last
    place and would be lost. `model` holds the averages in the model's own dtype, for scoring.
    """

    def __init__(self, model: Any, decay: float) -> None:
        self.model = frozen(copy.deepcopy(model))
        self._decay = decay
        self._averages = _in_float32(self.model)

    def divide(self) -> None:
        """On several processes: divided as the model is, each averages its own part."""
        shard(self.model)
        self._averages = _in_float32(self.model)

    @torch.no_grad()
    def update(self, model: Any) -> None:
        """Take in the weights after an optimizer step. Buffers are the same in both and stay."""
        for average, weight in zip(self._averages.values(), model.parameters(), strict=True):
            own_part(average).lerp_(own_part(weight).detach().float(), 1.0 - self._decay)
        self._round()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The averages in float32, put together."""
        return {name: whole(average) for name, average in self._averages.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a `state_dict`. Raises ValueError if it is of another model."""
        if state.keys() != self._averages.keys():
            raise ValueError(f"the averages' names differ: {sorted(state.keys() ^ self._averages.keys())[:3]}")
        for name, average in self._averages.items():
            average.copy_(divided_like(state[name].float(), average))
        self._round()

    @torch.no_grad()
    def begin(self, model: Any) -> None:
        """Anew, from these weights."""
        self.load_state_dict({name: whole(weight) for name, weight in model.named_parameters()})

    def _round(self) -> None:
        for average, parameter in zip(self._averages.values(), self.model.parameters(), strict=True):
            if average is not parameter:
                own_part(parameter).copy_(own_part(average))


def _in_float32(model: Any) -> dict[str, torch.Tensor]:
    """The parameters by name: themselves where they are of float32, else copies that are."""
    return {
        name: parameter if parameter.dtype == torch.float32 else parameter.detach().float()
        for name, parameter in model.named_parameters()
    }


@dataclass(frozen=True, slots=True)
class Extras:
    """What a microbatch is given besides its own tensors; without gradient, computed before the step's first update.

    `ids_BTM`: other tokens at each place, `sampler_BTM`: their log-probs under what chose them.
    """

    prox_BT: torch.Tensor | None = None
    ewma_BT: torch.Tensor | None = None
    reference_BT: torch.Tensor | None = None
    teacher_BT: torch.Tensor | None = None
    ids_BTM: torch.Tensor | None = None
    sampler_BTM: torch.Tensor | None = None
    teacher_BTM: torch.Tensor | None = None


@dataclass(slots=True)
class Companions:
    """`generator` draws other tokens; its state belongs to the checkpoint (torch's global one, unless given)."""

    reference: Any = None
    teacher: Any = None
    ewma: Ewma | None = None
    generator: torch.Generator | None = None

    @torch.no_grad()
    def extras(
        self,
        model: Any,
        batch: Microbatch,
        objective: Objective,
        temperature: float,
        *,
        prox: bool,
        ewma: bool = False,
        taught_BT: torch.Tensor | None = None,
    ) -> Extras:
        """Everything the objective needs of this microbatch. `prox`: the step-start policy's own log-probs, which cost a
        pass where a step has several updates and none where it has one.

        `taught_BT`: the teacher's log-probs, where they were computed before.
        """
        needs = objective.needs()
        ids, sampler = self._others(model, batch, needs, objective.alternatives(), temperature)
        teacher: tuple[torch.Tensor | None, torch.Tensor | None] = (taught_BT, None)
        if Need.TEACHER in needs and taught_BT is None:
            teacher = _score(self.teacher, batch, temperature, ids)
        average = None if self.ewma is None or not (ewma or Need.EWMA in needs) else self.ewma.model
        return Extras(
            prox_BT=_score(model, batch, temperature)[0] if prox else None,
            ewma_BT=None if average is None else _score(average, batch, temperature)[0],
            reference_BT=_score(self.reference, batch, temperature)[0] if Need.REFERENCE in needs else None,
            teacher_BT=teacher[0],
            ids_BTM=ids,
            sampler_BTM=sampler,
            teacher_BTM=teacher[1],
        )

    def _others(
        self, model: Any, batch: Microbatch, needs: frozenset[Need], count: int, temperature: float
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not needs & set(_CHOSEN):
            return None, None
        chooser = self.teacher if Need.TEACHER_DRAWS in needs else model
        generator = None if Need.TOP_K in needs else (self.generator or torch.default_generator)
        return choose_tokens(chooser, batch, temperature, count, generator)


def _score(
    model: Any, batch: Microbatch, temperature: float, ids_BTM: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    scores = score(model, batch, temperature, others_BTM=ids_BTM)
    return scores.logprob_BT, scores.others_BTM


def make_companions(
    objective: Objective,
    model: Any,
    *,
    initial: Callable[[], Any],
    teacher: Callable[[], Any] | None,
    ewma: float | None,
) -> Companions:
    """What the objective asks for. `initial`, `teacher`: load a policy. `ewma`: decay, None if nothing else wants one.

    Raises UserError that says what to set if the run can't supply something.
    """
    require_supplied(objective, teacher=teacher is not None, ewma=ewma is not None)
    needs = objective.needs()
    companions = Companions()
    if Need.REFERENCE in needs:
        companions.reference = frozen(initial())
    if needs & TAUGHT and teacher is not None:
        companions.teacher = frozen(teacher())
        _check_vocabulary(companions.teacher, model)
    if ewma is not None:
        companions.ewma = Ewma(model, ewma)
    return companions


def require_supplied(objective: Objective, *, teacher: bool, ewma: bool) -> None:
    """Raise UserError that says what to set unless a run supplies what its objective needs."""
    needs = objective.needs()
    if unknown := sorted(str(need) for need in needs - set(Need)):
        raise UserError(f"the objective needs {unknown[0]!r}, which nothing supplies; there are {', '.join(Need)}")
    if needs & TAUGHT and not teacher:
        raise UserError("this loss learns from a teacher: set trainer.teacher to the folder of a model")
    if Need.EWMA in needs and not ewma:
        raise UserError("this loss needs a moving average of the weights: set trainer.ewma_decay, say 0.9")


def frozen(model: Any) -> Any:
    """The model, for scoring alone."""
    return model.requires_grad_(False).eval()


def _check_vocabulary(teacher: Any, model: Any) -> None:
    ours, theirs = (m.get_output_embeddings().weight.shape[0] for m in (model, teacher))
    if ours != theirs:
        raise UserError(
            f"trainer.teacher has a vocabulary of {theirs} tokens and the policy of {ours}: they must agree"
        )
