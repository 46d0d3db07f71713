"""The critic learns values, and its state goes on exactly."""

from __future__ import annotations

import pytest
import torch

from protocol.errors import OurFault
from trainer.critic import Critic


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 8, generator=generator)
    return hidden, (hidden[:, 0] > 0).float()


def test_it_starts_at_zero_and_learns_what_states_are_worth():
    hidden, target = data()
    critic = Critic(8, learning_rate=1e-2, updates=2)
    assert critic.values(hidden).tolist() == [0.0] * 64
    explained = [critic.fit(hidden, target)["critic_explained"] for _ in range(60)]
    assert explained[0] < 0.0
    assert explained[-1] > 0.7


def test_its_state_goes_on_exactly():
    hidden, target = data()
    one, other = (Critic(8, learning_rate=1e-2, updates=2) for _ in range(2))
    one.fit(hidden, target)
    other.load_state_dict(one.state_dict())
    assert one.fit(hidden, target) == other.fit(hidden, target)
    assert torch.equal(one.values(hidden), other.values(hidden))


def test_making_one_leaves_the_runs_random_numbers_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    Critic(8, learning_rate=1e-2, updates=1)
    assert torch.equal(torch.rand(3), expected)


def test_targets_that_are_not_finite_change_nothing():
    hidden, target = data()
    critic = Critic(8, learning_rate=1e-2, updates=2)
    with pytest.raises(OurFault, match="finite"):
        critic.fit(hidden, target * float("nan"))
    assert critic.values(hidden).tolist() == [0.0] * 64
