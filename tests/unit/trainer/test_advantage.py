"""Advantages by hand, and which groups are dropped."""

from __future__ import annotations

import pytest

from protocol.errors import UserError
from protocol.rollout import Rollout, RolloutGroup, Segment, StopReason, VerifiedRollout, VersionSpan
from trainer.advantage import ADVANTAGES, dr_grpo, make_advantage, select


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("dr_grpo", [1.0, 0.0, 0.0, 1.0], [0.5, -0.5, -0.5, 0.5]),
        ("grpo", [1.0, 0.0, 0.0, 1.0], [1.0, -1.0, -1.0, 1.0]),
        ("grpo", [1.0, 1.0], [0.0, 0.0]),
        ("rloo", [1.0, 0.0, 0.0], [1.0, -0.5, -0.5]),
        ("rloo", [1.0], [0.0]),
        ("maxrl", [1.0, 0.0, 0.0, 0.0], [3.0, -1.0, -1.0, -1.0]),
        ("maxrl", [0.0, 0.0], [0.0, 0.0]),
    ],
)
def test_values_by_hand(name, rewards, expected):
    assert make_advantage(name)(rewards) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_advantages_of_a_group_sum_to_zero(name):
    assert sum(make_advantage(name)([0.3, 1.0, 0.0, 0.5])) == pytest.approx(0.0, abs=1e-9)


def test_an_unknown_name_is_refused_with_the_choices():
    with pytest.raises(UserError, match="dr_grpo, grpo, maxrl, rloo"):
        make_advantage("gae")


def group(name: str, rewards: list[float], requested: int) -> RolloutGroup:
    rollouts = []
    for number, reward in enumerate(rewards):
        sample = f"{name}{number}"
        rollout = Rollout("run", "lease", sample, (Segment.by_model((1,)),), (-0.5,), (VersionSpan(0, "d", 0, 1),),
                          ((b"",),), StopReason.EOS)  # fmt: skip
        rollouts.append(VerifiedRollout(sample, sample, "worker", rollout, reward, (-0.5,), True))
    return RolloutGroup(name, f"task/{name}", "arithmetic", (1,), requested, tuple(rollouts))


def test_groups_that_teach_nothing_are_dropped_and_counted():
    groups = [group("a", [1.0, 0.0], 2), group("b", [1.0, 1.0], 2), group("c", [0.0, 0.0], 2), group("d", [1.0], 2)]
    selection = select(groups, dr_grpo)
    assert [(kept.group_id, advantages) for kept, advantages in selection.groups] == [("a", (0.5, -0.5))]
    assert selection.dropped == {"zero_advantage": ("b0", "b1", "c0", "c1"), "too_small": ("d0",)}
    assert len(select(groups, dr_grpo, keep_zero=True).groups) == 3


def test_an_incomplete_group_takes_rloo_and_is_counted():
    selection = select([group("a", [1.0, 0.0, 0.0], 4)], dr_grpo)
    assert selection.groups[0][1] == pytest.approx((1.0, -0.5, -0.5))
    assert selection.incomplete_groups == 1
