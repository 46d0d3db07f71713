"""Advantages that need the policy, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from protocol.rollout import RolloutGroup, StopReason
from tests.unit.trainer.test_advantage import rollout
from trainer.advantage import Chosen
from trainer.batching import TrainSequence, pack
from trainer.refine import (
    Movement,
    by_key,
    critic_advantages,
    minimal_variance_advantages,
    movements,
    with_advantages,
)


def chosen(rewards, advantages=None, stops=None, tokens=2) -> Chosen:
    stops = stops or [StopReason.EOS] * len(rewards)
    items = tuple(
        rollout(str(i), reward, tokens, stop) for i, (reward, stop) in enumerate(zip(rewards, stops, strict=True))
    )
    group = RolloutGroup("g", "task", "sums", (1,), len(items), items)
    return Chosen(group, tuple(rewards), tuple(advantages or rewards))


def batch():
    """Completions 5 and 6 of one and two trained tokens."""
    numbers = (-1.0, -1.0)
    return pack(
        [
            TrainSequence((1,), (2, 3), (True, False), numbers, numbers, (0, 0), 1.0, key=5),
            TrainSequence((1,), (2, 4), (True, True), numbers, numbers, (0, 0), 1.0, key=6),
        ],
        token_budget=64,
    )[0]


def test_movements_are_sums_over_trained_tokens():
    packed = batch()
    prox = torch.where(packed.mask_BT, math.log(0.5), math.nan)
    moved = movements(packed, prox, torch.where(packed.mask_BT, math.log(0.25), math.nan))
    assert moved[5].log_weight == pytest.approx(math.log(2))
    assert moved[6].log_weight == pytest.approx(2 * math.log(2))
    assert (moved[5].squared_norm, moved[6].squared_norm) == pytest.approx((0.25, 0.5))


def test_the_baseline_of_least_variance_is_a_groups_own():
    moved = {3: Movement(0.0, 2.0), 4: Movement(math.log(2), 1.0), 9: Movement(0.0, 1.0)}
    groups = [(3, chosen([1.0, 0.0])), (7, chosen([1.0, 0.0, 0.5])), (20, chosen([1.0, 0.0]))]
    advantages = minimal_variance_advantages(groups, moved)
    assert advantages == pytest.approx({3: 2 / 3, 4: -1 / 3, 9: 0.0})


def test_critic_advantages_are_per_token_and_bootstrap_what_was_cut_off():
    group = chosen([1.0, 0.0], stops=[StopReason.EOS, StopReason.LENGTH])
    advantages = critic_advantages([(0, group)], {0: [0.5, 0.25], 1: [0.5, 0.25]}, lam=1.0)
    assert advantages[0] == pytest.approx([0.5, 0.75])
    assert advantages[1] == pytest.approx([-0.25, 0.0])
    by_length = critic_advantages([(0, group)], {0: [0.5, 0.25]}, lam=0.0)
    assert by_length[0] == pytest.approx([-0.25 + 2 / 3 * 0.75, 0.75])


def test_advantages_are_put_where_the_trained_tokens_are():
    packed = batch()
    refined = with_advantages(packed, {5: 7.0, 6: [1.0, 2.0]})
    assert by_key(refined, refined.advantage_BT) == {5: [7.0], 6: [1.0, 2.0]}
    assert refined.advantage_BT[~packed.mask_BT].tolist() == [0.0]
