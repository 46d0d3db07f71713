"""Objectives against numbers worked out by hand, on-policy gradients, and inputs that must not break them."""

from __future__ import annotations

import math

import pytest
import torch

from protocol.errors import UserError
from trainer.losses import LOSSES, LossInputs, clamp_behaviour, make_loss


def inputs(new, behaviour, advantage, mask=None, staleness=None) -> LossInputs:
    """One completion from lists of probabilities and advantages."""
    new_BT = torch.tensor([new]).log().requires_grad_()
    behaviour_BT = torch.tensor([behaviour]).log()
    return LossInputs(
        new_BT,
        behaviour_BT,
        behaviour_BT,
        torch.tensor([advantage]),
        torch.tensor([mask if mask is not None else [True] * len(new)]),
        torch.tensor([staleness if staleness is not None else [0] * len(new)]),
    )


def gradient(loss, given: LossInputs, denominator=None) -> list[list[float]]:
    loss(given, denominator).loss.backward()
    assert given.new_BT.grad is not None
    return given.new_BT.grad.tolist()


# Per token −ρA: ρ = 0.5/0.4 = 1.25, 0.9/0.5 = 1.8 (moved by 0.4 > 0.3: masked by IPO), 0.1/0.2 = 0.5.
NEW, BEHAVIOUR, ADVANTAGE = [0.5, 0.9, 0.1], [0.4, 0.5, 0.2], [1.0, 2.0, -1.0]
IPO_ANCHOR = 1e-3 * (math.log(1.25) ** 2 + math.log(1.8) ** 2 + math.log(0.5) ** 2)


@pytest.mark.parametrize(
    ("name", "params", "total", "kept"),
    [
        ("pg_is", {}, -1.25 - 3.6 + 0.5, [True, True, True]),
        ("ipo", {}, -1.25 + 0.5 + IPO_ANCHOR, [True, False, True]),
        ("ipo", {"epsilon": 0.05, "tau": 0.0}, 0.0, [False, False, False]),
        # min(1.25, 1.25), min(3.6, 2.56), min(−0.5, −0.8): clipped where it moved the way A wants.
        ("ppo", {}, -1.25 - 2.56 + 0.8, [True, False, False]),
        ("ppo", {"clip_high": 0.1, "clip_low": 0.6}, -1.1 - 2.2 + 0.5, [False, False, True]),
        ("async_ppo", {}, -1.25 - 2.56 + 0.8, [True, False, False]),
    ],
)
def test_values_by_hand(name, params, total, kept):
    output = make_loss(name, **params)(inputs(NEW, BEHAVIOUR, ADVANTAGE))
    assert float(output.loss.detach()) == pytest.approx(total / 3, abs=1e-6)
    assert output.kept_BT.tolist() == [kept]


def test_the_ceiling_bounds_what_ppo_leaves_unbounded():
    """ρ = 9 with A = −1: PPO's loss is 9, and its gradient too; truncated at C = 4 it is 4 without a gradient."""
    assert float(make_loss("ppo")(inputs([0.9], [0.1], [-1.0])).loss.detach()) == pytest.approx(9.0, rel=1e-5)
    given = inputs([0.9], [0.1], [-1.0])
    output = make_loss("async_ppo")(given)
    assert float(output.loss.detach()) == pytest.approx(4.0)
    assert output.metrics["ratio_truncated"] == 1.0
    output.loss.backward()
    assert given.new_BT.grad.tolist() == [[0.0]]


def test_gated_tokens_leave_the_denominator_and_masked_ones_stay():
    gated = inputs([0.5, 0.5], [0.5, 0.5], [1.0, 3.0], staleness=[0, 5])
    assert float(make_loss("async_ppo", max_staleness=4)(gated).loss.detach()) == pytest.approx(-1.0)
    masked = inputs([0.5, 0.9], [0.5, 0.5], [1.0, 3.0])
    assert float(make_loss("ipo", tau=0.0)(masked).loss.detach()) == pytest.approx(-0.5)


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_on_policy_the_gradient_is_the_policy_gradient(name, aggregation):
    """At new = old = behaviour, s = 0: d loss / d new = −A / denominator, whatever the objective."""
    given = inputs([0.5, 0.2, 0.7], [0.5, 0.2, 0.7], [1.0, -2.0, 0.5], mask=[True, True, False])
    loss = make_loss(name, aggregation=aggregation, constant_length=8)
    share = {"token": 2, "sequence": 2, "constant": 8}[aggregation]
    expected = [-1.0 / share, 2.0 / share, 0.0]
    assert gradient(loss, given)[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_extreme_inputs_stay_finite(name, aggregation):
    infinity = math.inf
    new_BT = torch.tensor([[0.0, -infinity, -1e9, -50.0, math.nan, -1.0]]).requires_grad_()
    behaviour_BT = torch.tensor([[-infinity, 0.0, -infinity, -1e9, math.nan, math.nan]])
    mask_BT = torch.tensor([[True, True, True, True, False, False]])
    for sign in (1.0, -1.0):
        new_BT.grad = None
        advantage_BT = torch.full((1, 6), sign)
        advantage_BT[0, 4] = infinity
        given = LossInputs(new_BT, behaviour_BT, behaviour_BT, advantage_BT, mask_BT, torch.zeros(1, 6))
        output = make_loss(name, aggregation=aggregation)(given)
        output.loss.backward()
        assert torch.isfinite(output.loss)
        assert torch.isfinite(new_BT.grad).all()
        assert new_BT.grad[0, 4:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_an_empty_mask_gives_zero(name):
    given = inputs([0.5, 0.5], [0.5, 0.5], [1.0, 1.0], mask=[False, False])
    output = make_loss(name)(given)
    assert float(output.loss.detach()) == 0.0
    output.loss.backward()
    assert given.new_BT.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_microbatches_with_a_common_denominator_add_up_to_the_whole(aggregation):
    generator = torch.Generator().manual_seed(0)
    new, behaviour, advantage = (torch.rand(4, 5, generator=generator) for _ in range(3))
    mask = torch.rand(4, 5, generator=generator) > 0.3
    whole = LossInputs(new.log(), behaviour.log(), behaviour.log(), advantage, mask, torch.zeros(4, 5))
    loss = make_loss("ipo", aggregation=aggregation, constant_length=5)
    parts = [
        LossInputs(*(getattr(whole, name)[rows] for name in whole.__dataclass_fields__))
        for rows in (slice(0, 1), slice(1, 4))
    ]
    denominator = sum(loss.denominator(part.mask_BT, part.staleness_BT) for part in parts)
    total = sum(float(loss(part, denominator).loss) for part in parts)
    assert total == pytest.approx(float(loss(whole).loss), abs=1e-6)


def test_aggregation_by_hand():
    """Token losses −1, −1, −1, −1 and −5: by token 9/5, by sequence (1 + 5)/2, by constant 9/(2·10)."""
    same = torch.zeros(2, 4)
    advantage = torch.tensor([[1.0, 1.0, 1.0, 1.0], [5.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[True] * 4, [True, False, False, False]])
    given = LossInputs(same, same, same, advantage, mask, same)
    values = [float(make_loss("pg_is", aggregation=how, constant_length=10)(given).loss)
              for how in ("token", "sequence", "constant")]  # fmt: skip
    assert values == pytest.approx([-9 / 5, -3.0, -9 / 20])


def test_a_workers_log_probs_are_confined_to_the_trusted_ones():
    old = torch.tensor([[-1.0, -1.0, -1.0, -1.0]])
    claimed = torch.tensor([[-1.05, -9.0, 0.0, math.nan]])
    assert clamp_behaviour(claimed, old, 0.1)[0].tolist() == pytest.approx([-1.05, -1.1, -0.9, -1.0])
    assert clamp_behaviour(claimed, old, 0.0).tolist() == old.tolist()
    with pytest.raises(UserError, match="behaviour_tolerance"):
        clamp_behaviour(claimed, old, -0.1)


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("ippo", {}, "async_ppo, ipo"),
        ("ipo", {"eps": 0.2}, "epsilon"),
        ("ipo", {"epsilon": "0.2"}, "must be of type float"),
        ("ipo", {"epsilon": 0.0}, "epsilon must be in"),
        ("ipo", {"tau": -1.0}, "tau"),
        ("ipo", {"aggregation": "mean"}, "token, sequence, constant"),
        ("ipo", {"aggregation": "constant"}, "constant_length"),
        ("ppo", {"clip_low": 1.0}, "clip_low"),
        ("async_ppo", {"ceiling": 1.0}, "ceiling"),
        ("async_ppo", {"max_staleness": True}, "must be of type int"),
        ("no.module:Loss", {}, "cannot load"),
        ("trainer.losses.base:LossInputs", {}, "must derive from"),
    ],
)
def test_errors_name_the_choices(name, params, said):
    with pytest.raises(UserError, match=said):
        make_loss(name, **params)


def test_a_researchers_own_loss_is_found_by_its_import_path():
    assert make_loss("trainer.losses.ipo:Ipo", epsilon=0.1).epsilon == 0.1
