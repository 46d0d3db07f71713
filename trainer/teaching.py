"""The teacher's stage: between verification and training, each group is scored as it comes, not when its batch is full.

    verified group ─ score ─▶ log-probs of the sampled tokens under the teacher, by rollout ─ take ─▶ step

So the teacher works while the rest of the batch is still being generated. What waits here is bounded by what the trainer may
hold: the groups of one batch, which the coordinator's capacity rule counts. There is such a stage on one process, and for the
sampled tokens alone (`opd` with actions "sampled"): other actions (draws, top k) are the step's own, and are scored in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from protocol.rollout import RolloutGroup
from trainer.batching import Microbatch, pack, sequences_of
from trainer.logprobs import score
from trainer.refine import by_key, spread


class TeacherStage:
    """Holds the scores of rollouts that were not trained on yet. `teacher`: a frozen causal LM."""

    def __init__(
        self, teacher: Any, *, temperature: float, token_budget: int, share_prompts: bool, device: str
    ) -> None:
        self._teacher = teacher
        self._temperature = temperature
        self._packing = {"token_budget": token_budget, "share_prompts": share_prompts}
        self._device = device
        self._scores: dict[str, list[float]] = {}

    @property
    def held(self) -> int:
        """Rollouts whose scores wait for their step."""
        return len(self._scores)

    @torch.no_grad()
    def receive(self, groups: Sequence[RolloutGroup]) -> None:
        """Score groups; those that are known already are passed over."""
        ids: list[str] = []
        sequences = []
        for group in groups:
            if all(item.rollout_id in self._scores for item in group.rollouts):
                continue
            newest = max(item.rollout.newest_version for item in group.rollouts)
            sequences += sequences_of(group, [0.0] * len(group.rollouts), newest, len(ids))
            ids += [item.rollout_id for item in group.rollouts]
        for batch in pack(sequences, **self._packing):  # type: ignore[arg-type]
            on_device = batch.to(self._device)
            values = by_key(on_device, score(self._teacher, on_device, self._temperature).logprob_BT)
            self._scores |= {ids[key]: numbers for key, numbers in values.items()}

    def take(self, batch: Microbatch, names: dict[int, str]) -> torch.Tensor | None:
        """[B, T] log-probs of a microbatch whose completions have these rollout ids by key; None unless all are here."""
        keys = batch.key_B.tolist()
        if not all(names[key] in self._scores for key in keys):
            return None
        return spread(batch, {key: self._scores[names[key]] for key in keys})

    def forget(self) -> None:
        """The step is done."""
        self._scores.clear()
