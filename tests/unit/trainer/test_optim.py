"""The optimizer: masters, warm-up, clipping, and steps that are skipped and counted."""

from __future__ import annotations

import math

import pytest
import torch

from protocol.errors import UserError
from tests.unit.trainer.test_batching import tiny_model
from trainer.optim import Optimizer, OptimizerSettings, hidden_matrices, learning_rate


def parameter(values, dtype=torch.float32):
    return torch.nn.Parameter(torch.tensor(values, dtype=dtype))


def test_the_rate_warms_up_and_stays():
    settings = OptimizerSettings(lr=1.0, warmup_steps=4)
    assert [learning_rate(settings, step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate(OptimizerSettings(lr=1.0), 0) == 1.0


def test_updates_below_the_precision_of_bfloat16_add_up_in_the_master():
    weight = parameter([1.0], torch.bfloat16)
    optimizer = Optimizer([weight], OptimizerSettings(lr=1e-3))
    for _ in range(8):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.dtype == torch.bfloat16
    assert float(weight.detach()) == pytest.approx(1.0 - 8e-3, abs=0.004)
    assert float(weight.detach()) < 1.0


def test_a_parameter_holds_what_is_published_and_its_master_the_rest():
    weight = parameter([1.0, 1.001])
    optimizer = Optimizer([weight], OptimizerSettings(lr=1e-3))
    seen = [weight.tolist()]
    for _ in range(8):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        seen.append(weight.tolist())
    assert weight.dtype == torch.float32
    assert all(torch.equal(torch.tensor(each), torch.tensor(each).bfloat16().float()) for each in seen)
    assert seen[0] == [1.0, 1.0] == seen[1], "less than half of the spacing"
    (master,) = optimizer.state_dict()["masters"]
    assert master.tolist() == pytest.approx([1.0 - 8e-3, 1.001 - 8e-3], abs=1e-5)


def test_gradients_are_clipped_and_their_norm_is_reported():
    weight = parameter([0.0, 0.0])
    optimizer = Optimizer([weight], OptimizerSettings(lr=0.1, max_grad_norm=1.0))
    weight.grad = torch.tensor([3.0, 4.0])
    report = optimizer.step()
    assert report.applied
    assert report.grad_norm == pytest.approx(5.0)
    assert weight.grad is None
    moments = optimizer.state_dict()["adamw"]["state"][0]["exp_avg"]
    assert moments.tolist() == pytest.approx([0.1 * 0.6, 0.1 * 0.8], rel=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e6])
def test_a_gradient_that_is_not_finite_or_explodes_is_skipped_and_counted(bad):
    weight = parameter([1.0, 2.0])
    optimizer = Optimizer([weight], OptimizerSettings(lr=0.1, skip_grad_norm=100.0))
    for _ in range(2):
        weight.grad = torch.tensor([bad, 1.0])
        assert not optimizer.step().applied
    assert weight.tolist() == [1.0, 2.0]
    assert (optimizer.counters.skipped, optimizer.counters.skipped_in_a_row, optimizer.counters.steps) == (2, 2, 0)
    weight.grad = torch.tensor([1.0, 1.0])
    assert optimizer.step().applied
    assert (optimizer.counters.skipped, optimizer.counters.skipped_in_a_row, optimizer.counters.steps) == (2, 0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_goes_on_exactly(dtype):
    def run(weight, optimizer, steps):
        for step in steps:
            weight.grad = torch.full_like(weight, math.sin(step))
            optimizer.step()

    settings = OptimizerSettings(lr=1e-2, warmup_steps=4, weight_decay=0.1)
    whole = parameter([1.0, -2.0], dtype)
    whole_optimizer = Optimizer([whole], settings)
    run(whole, whole_optimizer, range(3))
    state, weights = whole_optimizer.state_dict(), whole.detach().clone()
    state = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)
    run(whole, whole_optimizer, range(3, 7))

    resumed = torch.nn.Parameter(weights)
    resumed_optimizer = Optimizer([resumed], settings)
    resumed_optimizer.load_state_dict(state)
    run(resumed, resumed_optimizer, range(3, 7))
    assert torch.equal(resumed, whole)
    assert resumed_optimizer.counters == whole_optimizer.counters


@pytest.mark.parametrize(("before", "after"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_training_goes_on_in_another_precision(before, after):
    trained = parameter([1.0, -2.0], before)
    optimizer = Optimizer([trained], OptimizerSettings(lr=0.5))
    trained.grad = torch.ones_like(trained)
    optimizer.step()
    resumed = parameter([1.0, -2.0], after)
    going_on = Optimizer([resumed], OptimizerSettings(lr=1e-6))
    resumed.data.copy_(trained.detach())
    going_on.load_state_dict(optimizer.state_dict())
    resumed.grad = torch.ones_like(resumed)
    going_on.step()
    assert resumed.tolist() == pytest.approx([0.5, -2.5], abs=0.01)


def test_a_state_without_masters_goes_on_from_the_weights_it_came_with():
    """So were float32 weights saved before a version's precision was what trains."""
    state = Optimizer([parameter([1.0])], OptimizerSettings()).state_dict()
    resumed = parameter([1.001])
    optimizer = Optimizer([resumed], OptimizerSettings())
    resumed.data.copy_(torch.tensor([1.001]))
    optimizer.load_state_dict({**state, "masters": [None]})
    assert resumed.tolist() == [1.0]
    assert optimizer.state_dict()["masters"][0].tolist() == pytest.approx([1.001])


def test_the_state_of_another_model_is_refused():
    state = Optimizer([parameter([1.0])], OptimizerSettings()).state_dict()
    with pytest.raises(ValueError, match="1 parameters for 2"):
        Optimizer([parameter([1.0]), parameter([1.0])], OptimizerSettings()).load_state_dict(state)


@pytest.mark.parametrize(
    "settings", [{"lr": 0.0}, {"max_grad_norm": -1.0}, {"betas": (0.9, 1.0)}, {"warmup_steps": -1}]
)
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(UserError, match="optimizer"):
        OptimizerSettings(**settings)


def test_muon_takes_the_matrices_and_its_state_goes_on_exactly():
    model = tiny_model()
    matrices = hidden_matrices(model)
    assert len(matrices) == 2 * 7
    settings = OptimizerSettings(kind="muon", lr=1e-2)
    optimizer = Optimizer(model.parameters(), settings, matrices)
    other = tiny_model()
    again = Optimizer(other.parameters(), settings, hidden_matrices(other))

    tokens = torch.randint(40, (8, 30), generator=torch.Generator().manual_seed(0))

    def step(trained, by):
        trained(tokens, labels=tokens).loss.backward()
        return by.step()

    before = matrices[0].detach().clone()
    assert step(model, optimizer).applied
    change = matrices[0].detach() - before
    spread = torch.linalg.svdvals(change)
    assert float(spread.max() / spread.median()) < 4.0, "orthogonalized: all directions are moved about as far"
    other.load_state_dict(model.state_dict())
    again.load_state_dict(optimizer.state_dict())
    step(model, optimizer)
    step(other, again)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(ValueError, match="another kind"):
        Optimizer(model.parameters(), OptimizerSettings()).load_state_dict(optimizer.state_dict())


def test_a_scaled_rate_is_this_steps_alone():
    weight = parameter([1.0])
    optimizer = Optimizer([weight], OptimizerSettings(lr=0.1))
    weight.grad = torch.ones(1)
    assert optimizer.step(0.5).lr == pytest.approx(0.05)
    weight.grad = torch.ones(1)
    assert optimizer.step().lr == pytest.approx(0.1)
