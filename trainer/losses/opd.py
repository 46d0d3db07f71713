"""On-policy distillation: reverse KL to a teacher, recomputed by the learner, on states that the student visited.

    −mean_j sg(ρ_j A_j) · new_j,   A_j = log q_j − sg(new_j)

q is the teacher; the actions j are the sampled token itself (`sampled`), M draws of the sampler at that place (`drawn`), the
policy's M likeliest tokens (`top_k`), or M draws of the teacher (`teacher`). A is computed from `new` of now; `stale` computes
it from the sampler's log-probs. Neither is clipped; `clip` adds PPO's clip: the 2 × 2 of AsyncOPD. `top_k` sums
p (log p − log q) over the set with its own gradient, without renormalizing: the tail counts as matched. `teacher` is
the forward KL, −mean_j new_j. The run's advantages are not used, and no group is dropped for having none.
Source: AsyncOPD (2026).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from protocol.errors import OurFault, UserError
from trainer.losses.base import Loss, TokenLoss, one_of
from trainer.losses.inputs import LossInputs, Need, bounded, log_ratio
from trainer.losses.ppo import clipped

_NEEDS = {
    "sampled": {Need.TEACHER},
    "drawn": {Need.TEACHER, Need.DRAWS},
    "top_k": {Need.TEACHER, Need.TOP_K},
    "teacher": {Need.TEACHER, Need.TEACHER_DRAWS},
}


@dataclass(frozen=True)
class Opd(Loss):
    """`actions`: as above. `count`: M. `stale`: A from the sampler's log-probs. `clip`: PPO's clip on ρ, with its bounds."""

    actions: str = "sampled"
    count: int = 8
    stale: bool = False
    clip: bool = False
    clip_low: float = 0.2
    clip_high: float = 0.28

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("opd", "actions", self.actions, list(_NEEDS))
        if self.count < 1:
            raise UserError(f"opd: count must be at least 1, got {self.count}")
        if not (0.0 < self.clip_low < 1.0 and self.clip_high > 0.0):
            raise UserError(
                f"opd: clip_low must be in (0, 1) and clip_high above 0, got {self.clip_low}, {self.clip_high}"
            )

    def needs(self) -> frozenset[Need]:
        return frozenset(_NEEDS[self.actions])

    def uses_advantages(self) -> bool:
        return False

    def alternatives(self) -> int:
        return 0 if self.actions == "sampled" else self.count

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        if self.actions == "sampled":
            parts = (inputs.new_BT, inputs.behaviour_BT, inputs.need(Need.TEACHER))
            new_BTM, sampler_BTM, teacher_BTM = (bounded(part)[..., None] for part in parts)
        else:
            others = inputs.alternatives()
            new_BTM, sampler_BTM = bounded(others.new_BTM), bounded(others.sampler_BTM)
            if others.teacher_BTM is None:
                raise OurFault("opd needs the teacher's log-probs of other tokens, and the step was made without them")
            teacher_BTM = bounded(others.teacher_BTM)
        everything_BT = torch.ones_like(inputs.mask_BT)
        if self.actions == "teacher":
            return TokenLoss(-new_BTM.mean(dim=-1), everything_BT, {})
        if self.actions == "top_k":
            return TokenLoss((new_BTM.exp() * (new_BTM - teacher_BTM)).sum(dim=-1), everything_BT, {})
        return self._monte_carlo(new_BTM, sampler_BTM, teacher_BTM)

    def _monte_carlo(self, new_BTM: torch.Tensor, sampler_BTM: torch.Tensor, teacher_BTM: torch.Tensor) -> TokenLoss:
        advantage_BTM = teacher_BTM - (sampler_BTM if self.stale else new_BTM.detach())
        ratio_BTM = log_ratio(new_BTM, sampler_BTM).exp()
        if self.clip:
            loss_BTM, kept_BTM = clipped(ratio_BTM, advantage_BTM, self.clip_low, self.clip_high)
            return TokenLoss(loss_BTM.mean(dim=-1), kept_BTM.any(dim=-1), {})
        loss_BTM = -(ratio_BTM.detach() * advantage_BTM) * new_BTM
        return TokenLoss(loss_BTM.mean(dim=-1), torch.ones_like(loss_BTM[..., 0], dtype=torch.bool), {})
