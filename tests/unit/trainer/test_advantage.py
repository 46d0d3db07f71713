"""Advantages by hand, and which groups are dropped."""

from __future__ import annotations

import pytest

from protocol.errors import UserError
from protocol.rollout import Rollout, RolloutGroup, Segment, StopReason, VerifiedRollout, VersionSpan
from trainer.advantage import (
    ADVANTAGES,
    GroupAdvantage,
    LengthBudget,
    RawReward,
    check_advantage,
    select,
)
from trainer.baseline import MovingBaseline
from trainer.filters import Filters

DR_GRPO = GroupAdvantage("dr_grpo")


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
    assert ADVANTAGES[name](rewards) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_advantages_of_a_group_sum_to_zero(name):
    assert sum(ADVANTAGES[name]([0.3, 1.0, 0.0, 0.5])) == pytest.approx(0.0, abs=1e-9)


def test_an_unknown_name_is_refused_with_the_choices():
    with pytest.raises(UserError, match="critic, dr_grpo, grpo, maxrl, rloo, single"):
        check_advantage("gae")
    for name in (*ADVANTAGES, "single", "critic"):
        check_advantage(name)


def rollout(sample: str, reward: float, tokens: int = 1, stop: StopReason = StopReason.EOS) -> VerifiedRollout:
    spans = (VersionSpan(0, "d", 0, tokens),)
    made = Rollout("run", "lease", sample, (Segment.by_model((1,) * tokens),), (-0.5,) * tokens, spans, ((b"",),), stop)
    return VerifiedRollout(sample, sample, "worker", made, reward, (-0.5,) * tokens, True)


def group(name: str, rewards: list[float], requested: int) -> RolloutGroup:
    rollouts = tuple(rollout(f"{name}{number}", reward) for number, reward in enumerate(rewards))
    return RolloutGroup(name, f"task/{name}", "arithmetic", (1,), requested, rollouts)


def ids(dropped) -> dict[str, tuple[str, ...]]:
    return {reason: tuple(item.rollout_id for item in items) for reason, items in dropped.items()}


def test_groups_that_teach_nothing_are_dropped_and_counted():
    groups = [group("a", [1.0, 0.0], 2), group("b", [1.0, 1.0], 2), group("c", [0.0, 0.0], 2), group("d", [1.0], 2)]
    selection = select(groups, DR_GRPO)
    assert [(kept.group.group_id, kept.advantages) for kept in selection.groups] == [("a", (0.5, -0.5))]
    assert ids(selection.dropped) == {"zero_advantage": ("b0", "b1", "c0", "c1"), "too_small": ("d0",)}
    assert len(select(groups, DR_GRPO, Filters(keep_zero_advantage=True)).groups) == 3


def test_an_incomplete_group_takes_rloo_and_is_counted():
    selection = select([group("a", [1.0, 0.0, 0.0], 4)], DR_GRPO)
    assert selection.groups[0].advantages == pytest.approx((1.0, -0.5, -0.5))
    assert selection.incomplete_groups == 1


def test_groups_outside_the_pass_rates_are_dropped():
    groups = [group("a", [1.0, 0.0, 0.0, 0.0], 4), group("b", [1.0, 1.0, 1.0, 0.0], 4), group("c", [1.0, 0.0], 2)]
    selection = select(groups, DR_GRPO, Filters(pass_rate=(0.25, 0.5)))
    assert [kept.group.group_id for kept in selection.groups] == ["a", "c"]
    assert ids(selection.dropped) == {"pass_rate": ("b0", "b1", "b2", "b3")}


def test_what_was_cut_off_counts_for_the_baseline_and_is_not_trained_on():
    items = (rollout("x", 1.0), rollout("y", 0.0), rollout("z", 0.0, stop=StopReason.LENGTH))
    whole = RolloutGroup("g", "task/g", "arithmetic", (1,), 3, items)
    selection = select([whole], DR_GRPO, Filters(mask_overlong=True))
    assert selection.groups[0].advantages == pytest.approx((2 / 3, -1 / 3, None))
    assert [item.rollout_id for item in selection.groups[0].trained] == ["x", "y"]
    assert ids(selection.dropped) == {"overlong": ("z",)}
    all_long = RolloutGroup(
        "h", "task/h", "arithmetic", (1,), 2,
        (rollout("p", 1.0, stop=StopReason.LENGTH), rollout("q", 0.0, stop=StopReason.LENGTH)),
    )  # fmt: skip
    assert select([all_long], DR_GRPO, Filters(mask_overlong=True)).groups == ()


def test_a_length_budget_shapes_rewards_and_not_what_is_dropped():
    items = (rollout("x", 1.0, tokens=30), rollout("y", 1.0, tokens=10))
    same = RolloutGroup("g", "task/g", "arithmetic", (1,), 2, items)
    budget = LengthBudget(target=10, alpha=0.01)
    assert ids(select([same], DR_GRPO, budget=budget).dropped) == {"zero_advantage": ("x", "y")}
    kept = select([same], DR_GRPO, Filters(keep_zero_advantage=True), budget)
    assert kept.groups[0].rewards == pytest.approx((0.8, 1.0))
    assert kept.groups[0].advantages == pytest.approx((-0.1, 0.1))
    assert LengthBudget()(items[0]) == 1.0


def test_a_moving_baseline_knows_only_what_came_before():
    baseline = MovingBaseline(decay=0.5)
    groups = [group("a", [1.0], 1), group("b", [0.0], 1), group("c", [1.0], 1)]
    selection = select(groups, baseline)
    # b = 1 at first, then 1, ½: advantages 0, −1, ½.
    assert [kept.advantages for kept in selection.groups] == [(0.0,), (-1.0,), (0.5,)]
    assert baseline.averages == {"arithmetic": 0.75}


def test_a_critic_takes_the_reward_itself_of_groups_of_any_size():
    selection = select([group("a", [1.0], 1), group("b", [1.0, 1.0], 2)], RawReward())
    assert [kept.advantages for kept in selection.groups] == [(1.0,), (1.0, 1.0)]
