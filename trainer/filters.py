"""Which groups and rollouts teach something. Pure; everything that is left out is counted by reason and length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.rollout import StopReason, VerifiedRollout

_EQUAL = 1e-9  # rewards closer than this are the same


@dataclass(frozen=True, slots=True)
class Filters:
    """`keep_zero_advantage`: keep groups whose rewards are all equal. `pass_rate`: the least and the largest mean reward of
    a group that is trained on (online difficulty filter). `mask_overlong`: completions that were cut off by the length
    limit count for the group's baseline and are not trained on: their reward says nothing about how they would have
    ended (DAPO's overlong filtering).
    """

    keep_zero_advantage: bool = False
    pass_rate: tuple[float, float] = (0.0, 1.0)
    mask_overlong: bool = False

    def group_reason(self, rewards: Sequence[float], *, alone: bool) -> str:
        """Why a group is dropped, "" if it isn't. `rewards`: as verified. `alone`: a rollout needs no others."""
        if not rewards or (len(rewards) < 2 and not alone):
            return "too_small"
        mean = sum(rewards) / len(rewards)
        if not self.pass_rate[0] - _EQUAL <= mean <= self.pass_rate[1] + _EQUAL:
            return "pass_rate"
        if not (alone or self.keep_zero_advantage) and max(rewards) - min(rewards) < _EQUAL:
            return "zero_advantage"
        return ""

    def rollout_reason(self, item: VerifiedRollout) -> str:
        """Why a rollout of a group that is kept is not trained on, "" if it is."""
        return "overlong" if self.mask_overlong and item.rollout.stop_reason == StopReason.LENGTH else ""


NO_FILTERS = Filters()
