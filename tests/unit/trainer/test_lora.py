"""Adapters: version 0 is the initial policy, only they train, and what is published is the sum."""

from __future__ import annotations

import pytest
import torch

from protocol.errors import UserError
from tests.unit.trainer.test_batching import completions, tiny_model
from trainer.batching import pack
from trainer.crew import published_weights
from trainer.logprobs import score
from trainer.lora import LoraLinear, adapt
from trainer.precision import round_as_published


def test_version_0_is_the_initial_policy_and_few_parameters_train():
    model = tiny_model()
    round_as_published(model)
    batch = pack(completions(), token_budget=10_000)[0]
    before, names = score(model, batch, 1.0).logprob_BT.detach(), set(model.state_dict())
    count = adapt(model, rank=4, alpha=8.0)
    after = score(model, batch, 1.0).logprob_BT
    assert torch.equal(before, after.detach())
    assert count < sum(parameter.numel() for parameter in model.parameters()) / 2
    assert {name for name in model.state_dict() if "lora" not in name} == names


def test_what_is_published_computes_what_was_trained():
    """To the bit, but for sums in another order: what bfloat16 can't hold is not trained with either."""
    model, plain = tiny_model(), tiny_model()
    round_as_published(model)
    batch = pack(completions(), token_budget=10_000)[0]
    adapt(model, rank=4, alpha=8.0)
    frozen = {name: value.clone() for name, value in model.state_dict().items() if "lora" not in name}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=5.0)
    for _ in range(3):
        optimizer.zero_grad()
        score(model, batch, 1.0).logprob_BT.sum().backward()
        optimizer.step()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in frozen.items())
    weights = published_weights(model)
    assert set(weights) == set(plain.state_dict())
    plain.load_state_dict({name: value.float() for name, value in weights.items()})
    expected = score(model, batch, 1.0).logprob_BT
    start = score(tiny_model(), batch, 1.0).logprob_BT
    assert float((expected - start).detach().abs().max()) > 0.05
    assert torch.allclose(score(plain, batch, 1.0).logprob_BT, expected, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_those_of_the_two_products(bias):
    layer = torch.nn.Linear(12, 8, bias=bias)
    round_as_published(layer)
    model = torch.nn.Sequential(layer)
    model.base_model = model
    adapt(model, rank=3, alpha=6.0)
    assert isinstance(layer, LoraLinear)
    with torch.no_grad():
        layer.lora_b.normal_(std=0.2)
    inputs = torch.randn(2, 5, 12, requires_grad=True)
    torch.sin(layer(inputs)).sum().backward()
    given = [tensor.grad.clone() for tensor in (inputs, layer.lora_a, layer.lora_b)]
    for tensor in (inputs, layer.lora_a, layer.lora_b):
        tensor.grad = None
    plain = torch.nn.functional.linear(inputs, layer.weight, layer.bias)
    torch.sin(plain + layer.lora_scale * (inputs @ layer.lora_a.T @ layer.lora_b.T)).sum().backward()
    for found, tensor in zip(given, (inputs, layer.lora_a, layer.lora_b), strict=True):
        assert torch.allclose(found, tensor.grad, rtol=0.02, atol=0.05)  # the sum is rounded to bf16


def test_a_rank_that_exceeds_a_matrix_is_refused():
    with pytest.raises(UserError, match="lora_rank"):
        adapt(tiny_model(), rank=33, alpha=1.0)
