"""What wraps a loss and what stands beside it, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.trainer.losses.given import constant, given
from trainer.losses import LossInputs, Need, make_objective
from trainer.losses.vcpo import Vcpo, effective_size, minimal_variance_baseline


def test_old_tokens_weigh_less_in_numerator_and_denominator():
    """Losses −1 and −3 at s = 0 and 2, γ = ½: (1 + 3/4) / (1 + 1/4)."""
    objective = make_objective("pg_is", modifiers=[{"name": "soft_staleness", "gamma": 0.5}])
    inputs = given([0.5, 0.5], [0.5, 0.5], [1.0, 3.0], staleness=[0, 2])
    assert float(objective(inputs).loss.detach()) == pytest.approx(-1.75 / 1.25)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("age", [0, 1, 7])
def test_soft_weights_cancel_where_a_batch_has_one_staleness(aggregation, age):
    params = {"aggregation": aggregation, **constant(aggregation, 4)}
    inputs = given([0.5, 0.9, 0.1], [0.4, 0.5, 0.2], [1.0, 2.0, -1.0], staleness=[age] * 3)
    soft = make_objective("ipo", params, [{"name": "soft_staleness"}])
    assert float(soft(inputs).loss.detach()) == pytest.approx(
        float(make_objective("ipo", params)(inputs).loss.detach())
    )


def test_beyond_the_ceiling_nothing_counts():
    objective = make_objective("pg_is", modifiers=[{"name": "soft_staleness", "ceiling": 4}])
    inputs = given([0.5, 0.5], [0.5, 0.5], [1.0, 3.0], staleness=[0, 5])
    output = objective(inputs)
    assert float(output.loss.detach()) == pytest.approx(-1.0)
    assert output.kept_BT.tolist() == [[True, False]]


def two_completions(first: float, second: float) -> LossInputs:
    """Of two tokens each, moved by so many nats per token; the second token of the first is masked."""
    moved = torch.tensor([[first, 99.0], [second, second]])
    zero = torch.zeros(2, 2)
    mask = torch.tensor([[True, False], [True, True]])
    return LossInputs(moved, zero, zero, torch.ones(2, 2), mask, torch.zeros(2, 2, dtype=torch.long))


@pytest.mark.parametrize(
    ("params", "first", "second", "kept"),
    [
        ({}, 0.0005, 0.002, [True, False]),
        ({}, -0.002, 0.0, [False, True]),
        ({"rule": "product"}, 2.0, 1.1, [True, False]),  # products e^2 ≤ 8 and e^2.2 > 8
        ({"rule": "product"}, -9.0, 1.0, [True, True]),  # the upper side alone
        ({"rule": "product", "bound": 2.0}, 0.7, 0.3, [False, True]),
    ],
)
def test_a_completion_that_is_off_as_a_whole_costs_nothing_and_still_counts(params, first, second, kept):
    inputs = two_completions(first, second)
    output = make_objective("pg_is", modifiers=[{"name": "seq_drop", **params}])(inputs)
    assert output.kept_BT.tolist() == [[kept[0], False], [kept[1], kept[1]]]
    expected = -(kept[0] * math.exp(first) + 2 * kept[1] * math.exp(second)) / 3
    assert float(output.loss) == pytest.approx(expected, rel=1e-5)


def test_the_rate_shrinks_with_the_effective_sample_size():
    """Weights 1, 1 and 4: ESS = 36 / 18 = 2 of 3."""
    weights = [0.0, 0.0, math.log(4.0)]
    assert effective_size(weights) == pytest.approx(2.0)
    assert Vcpo().rate_scale(weights) == pytest.approx(math.sqrt(2 / 3))
    assert Vcpo(scale_rate=False).rate_scale(weights) == 1.0
    assert Vcpo().rate_scale([]) == 1.0
    assert Vcpo().rate_scale([5000.0, -5000.0]) == pytest.approx(math.sqrt(0.5))


def test_the_baseline_of_least_variance_by_hand():
    """w² ‖g‖² = 1·2 and 4·1 for rewards 1 and 0: b = 2/6; without gradients it is the mean."""
    assert minimal_variance_baseline([1.0, 0.0], [0.0, math.log(2.0)], [2.0, 1.0]) == pytest.approx(1 / 3)
    assert minimal_variance_baseline([1.0, 0.0], [0.0, 0.0], [0.0, 0.0]) == 0.5


def beside(regularizer: dict, **extra) -> torch.Tensor:
    """The gradient that a regularizer alone has (A = 0)."""
    inputs = given([0.5, 0.9], [0.5, 0.9], [0.0, 0.0], **extra)
    make_objective("pg_is", regularizers=[regularizer])(inputs).loss.backward()
    return inputs.new_BT.grad[0]


def test_reference_kl_by_hand():
    """k3's gradient is β(1 − ref/new), k1's β ln(new/ref), each over two tokens."""
    for estimator, expected in (("k3", [0.5 * (1 - 0.5), 0.0]), ("k1", [0.5 * math.log(2), 0.0])):
        gradient = beside({"name": "reference_kl", "beta": 1.0, "estimator": estimator}, reference=[0.25, 0.9])
        assert gradient.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_entropy_bonus_pays_for_entropy():
    objective = make_objective("pg_is", regularizers=[{"name": "entropy", "beta": 0.5}])
    inputs = given([0.5], [0.5], [0.0], entropy=[math.e])
    assert float(objective(inputs).loss.detach()) == pytest.approx(-0.5)


def test_an_objective_says_what_it_needs():
    objective = make_objective(
        "opd", {"actions": "drawn", "count": 4}, [{"name": "vcpo"}], [{"name": "entropy"}, {"name": "reference_kl"}]
    )
    assert objective.needs() == {Need.TEACHER, Need.DRAWS, Need.ENTROPY, Need.REFERENCE}
    assert objective.alternatives() == 4
    assert make_objective("ipo").needs() == frozenset()
