"""What holds for every objective: on-policy gradients, inputs that must not break them, sums over microbatches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given as generate
from hypothesis import settings
from hypothesis import strategies as st

from protocol.errors import UserError
from tests.unit.trainer.losses.given import constant, given
from trainer.losses import LOSSES, MODIFIERS, Alternatives, LossInputs, make_loss, make_objective
from trainer.losses.base import Loss, TokenLoss
from trainer.losses.dppo import binary_kl
from trainer.losses.inputs import MAX_LOG_RATIO
from trainer.losses.m2po import second_moment_cap

POLICY_GRADIENTS = sorted(set(LOSSES) - {"opd"})  # opd climbs towards its teacher, whatever the advantage
VARIANTS = [(name, {}) for name in LOSSES] + [
    ("icepop", {"variant": "whole"}),
    ("dppo", {"divergence": "kl", "tau": 1e-3}),
    ("decoupled_ppo", {"beyond": "truncate"}),
    ("klpo", {"draws": 2}),
    ("klpo", {"anchor": "reference"}),
    *(("opd", {"actions": actions, "count": 2}) for actions in ("drawn", "top_k", "teacher")),
    ("opd", {"clip": True, "stale": True}),
]


def filled(new_BT, behaviour_BT, advantage_BT, mask_BT, staleness_BT=None) -> LossInputs:
    """With everything that any objective may ask for, taken from the same numbers."""
    others_BTM = torch.stack([behaviour_BT, new_BT.detach()], dim=-1)
    return LossInputs(
        new_BT,
        behaviour_BT,
        behaviour_BT,
        advantage_BT,
        mask_BT,
        torch.zeros(new_BT.shape, dtype=torch.long) if staleness_BT is None else staleness_BT,
        prox_BT=new_BT.detach(),
        ewma_BT=new_BT.detach(),
        reference_BT=behaviour_BT,
        teacher_BT=behaviour_BT,
        entropy_BT=-new_BT,
        others=Alternatives(others_BTM.clone().requires_grad_(), others_BTM, others_BTM),
    )


@pytest.mark.parametrize("name", POLICY_GRADIENTS)
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_on_policy_the_gradient_is_the_policy_gradient(name, aggregation):
    """At new = old = behaviour, s = 0: d loss / d new = −A / denominator, whatever the objective."""
    new_BT = torch.tensor([[0.5, 0.2, 0.7], [0.3, 0.9, 0.4]]).log().requires_grad_()
    advantage_BT = torch.tensor([[1.0] * 3, [-2.0] * 3])
    mask_BT = torch.tensor([[True, True, False], [True, False, False]])
    loss = make_loss(name, aggregation=aggregation, **constant(aggregation, 8))
    loss(filled(new_BT, new_BT.detach(), advantage_BT, mask_BT)).loss.backward()
    shares = {"token": [3, 3], "sequence": [4, 2], "constant": [16, 16]}[aggregation]
    expected = [[-1.0 / shares[0], -1.0 / shares[0], 0.0], [2.0 / shares[1], 0.0, 0.0]]
    for row, values in zip(new_BT.grad.tolist(), expected, strict=True):
        assert row == pytest.approx(values, abs=1e-6)


@pytest.mark.parametrize(("name", "params"), VARIANTS)
@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_extreme_inputs_stay_finite(name, params, aggregation):
    infinity = math.inf
    new_BT = torch.tensor([[0.0, -infinity, -1e9, -50.0, math.nan, -1.0]]).requires_grad_()
    behaviour_BT = torch.tensor([[-infinity, 0.0, -infinity, -1e9, math.nan, math.nan]])
    mask_BT = torch.tensor([[True, True, True, True, False, False]])
    for sign in (1.0, -1.0):
        new_BT.grad = None
        advantage_BT = torch.full((1, 6), sign)
        advantage_BT[0, 4] = infinity
        inputs = filled(new_BT, behaviour_BT, advantage_BT, mask_BT)
        output = make_loss(name, aggregation=aggregation, **params)(inputs)
        output.loss.backward()
        assert torch.isfinite(output.loss)
        assert torch.isfinite(output.loss_BT).all()
        gradient = new_BT.grad if new_BT.grad is not None else inputs.others.new_BTM.grad[..., 0]
        assert torch.isfinite(gradient).all()
        assert gradient[0, 4:].tolist() == [0.0, 0.0]


LOGPROBS = st.lists(st.floats(-200.0, 0.0), min_size=4, max_size=4)


@pytest.mark.parametrize(("name", "params"), VARIANTS)
@settings(deadline=None, max_examples=25, derandomize=True)
@generate(new=LOGPROBS, behaviour=LOGPROBS, advantage=st.lists(st.floats(-10, 10), min_size=4, max_size=4))
def test_any_log_probs_give_finite_losses_and_gradients(name, params, new, behaviour, advantage):
    new_BT = torch.tensor([new]).requires_grad_()
    mask_BT = torch.tensor([[True, True, True, False]])
    staleness_BT = torch.tensor([[0, 1, 64, 3]])
    inputs = filled(new_BT, torch.tensor([behaviour]), torch.tensor([advantage]), mask_BT, staleness_BT)
    output = make_loss(name, **params)(inputs)
    output.loss.backward()
    assert torch.isfinite(output.loss)
    assert new_BT.grad is None or torch.isfinite(new_BT.grad).all()
    assert not bool(output.kept_BT[0, 3])


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_an_empty_mask_gives_zero(name):
    new_BT = torch.tensor([[0.5, 0.5]]).log().requires_grad_()
    mask_BT = torch.zeros(1, 2, dtype=torch.bool)
    output = make_loss(name)(filled(new_BT, new_BT.detach(), torch.ones(1, 2), mask_BT))
    assert float(output.loss.detach()) == 0.0
    output.loss.backward()
    assert new_BT.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("modifiers", [[], [{"name": "soft_staleness"}]])
def test_microbatches_with_a_common_denominator_add_up_to_the_whole(aggregation, modifiers):
    generator = torch.Generator().manual_seed(0)
    new, behaviour, advantage = (torch.rand(4, 5, generator=generator) for _ in range(3))
    mask = torch.rand(4, 5, generator=generator) > 0.3
    staleness = torch.randint(4, (4, 5), generator=generator)
    whole = LossInputs(new.log(), behaviour.log(), behaviour.log(), advantage, mask, staleness)
    objective = make_objective("ipo", {"aggregation": aggregation, **constant(aggregation, 5)}, modifiers)
    parts = [
        LossInputs(*(getattr(whole, name)[rows] for name in list(whole.__dataclass_fields__)[:6]))
        for rows in (slice(0, 1), slice(1, 4))
    ]
    denominator = sum(objective.denominator(part.mask_BT, part.staleness_BT) for part in parts)
    total = sum(float(objective(part, denominator).loss) for part in parts)
    assert total == pytest.approx(float(objective(whole).loss), abs=1e-6)


def test_aggregation_by_hand():
    """Token losses −1, −1, −1, −1 and −5: by token 9/5, by sequence (1 + 5)/2, by constant 9/(2·10)."""
    same = torch.zeros(2, 4)
    advantage = torch.tensor([[1.0, 1.0, 1.0, 1.0], [5.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[True] * 4, [True, False, False, False]])
    inputs = LossInputs(same, same, same, advantage, mask, same)
    values = [float(make_loss("pg_is", aggregation=how, **constant(how, 10))(inputs).loss)
              for how in ("token", "sequence", "constant")]  # fmt: skip
    assert values == pytest.approx([-9 / 5, -3.0, -9 / 20])


def test_gated_tokens_leave_the_denominator_and_masked_ones_stay():
    gated = given([0.5, 0.5], [0.5, 0.5], [1.0, 3.0], staleness=[0, 5])
    assert float(make_loss("async_ppo", max_staleness=4)(gated).loss.detach()) == pytest.approx(-1.0)
    masked = given([0.5, 0.9], [0.5, 0.5], [1.0, 3.0])
    assert float(make_loss("ipo", tau=0.0)(masked).loss.detach()) == pytest.approx(-0.5)


@settings(deadline=None, max_examples=50, derandomize=True)
@generate(st.lists(st.floats(-5.0, 5.0), min_size=1, max_size=30), st.floats(1e-3, 2.0))
def test_the_cap_of_a_second_moment_spends_the_budget_and_no_more(moved, moment):
    moved_N = torch.tensor(moved, dtype=torch.float64)
    cap = second_moment_cap(moved_N, moment)
    spent = float(moved_N.square().clamp(max=cap * cap).mean())
    assert spent <= moment + 1e-9
    if cap < MAX_LOG_RATIO:
        assert spent == pytest.approx(moment, abs=1e-9)


def test_a_second_moment_of_nothing_has_no_cap():
    assert second_moment_cap(torch.zeros(0), 0.04) == MAX_LOG_RATIO


def test_binary_divergences_by_hand():
    p, q = torch.tensor([0.5, 0.2, 0.3, 1.0]), torch.tensor([0.9, 0.1, 0.3, 1.0])
    expected = [0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(5), 0.2 * math.log(2) + 0.8 * math.log(8 / 9), 0.0, 0.0]
    assert binary_kl(p, q).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", sorted(MODIFIERS))
def test_modifiers_leave_on_policy_data_alone(name):
    new_BT = torch.tensor([[0.5, 0.2]]).log().requires_grad_()
    inputs = filled(new_BT, new_BT.detach(), torch.tensor([[1.0, 1.0]]), torch.ones(1, 2, dtype=torch.bool))
    plain, wrapped = make_objective("ipo"), make_objective("ipo", modifiers=[{"name": name}])
    assert float(wrapped(inputs).loss.detach()) == pytest.approx(float(plain(inputs).loss.detach()))
    assert wrapped.rate_scale([0.0, 0.0]) == 1.0


def test_cleaning_covers_what_is_optional_too():
    nan = torch.tensor([[math.nan, -1.0]])
    inputs = replace(
        filled(nan, nan, nan, torch.tensor([[False, True]])),
        prox_BT=nan,
        others=Alternatives(nan[..., None], nan[..., None]),
    )
    clean = inputs.cleaned()
    for name in ("new_BT", "prox_BT", "ewma_BT", "reference_BT", "teacher_BT", "entropy_BT"):
        assert torch.isfinite(getattr(clean, name)).all(), name
    assert torch.isfinite(clean.others.new_BTM).all()


@dataclass(frozen=True)
class _Mean(Loss):
    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        return TokenLoss(inputs.new_BT.mean(), inputs.mask_BT, {})


def test_a_loss_that_is_no_loss_per_token_is_refused() -> None:
    with pytest.raises(UserError, match=r"_Mean.token_loss: loss_BT must have a value per token, \[1, 2\], got \[\]"):
        _Mean()(given([0.5, 0.5], [0.5, 0.5], [1.0, 1.0]))
