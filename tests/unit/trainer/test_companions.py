"""What the objective needs besides the batch, supplied or refused; on a tiny model."""

from __future__ import annotations

import copy

import pytest
import torch

from protocol.errors import UserError
from tests.unit.trainer.test_batching import completions, tiny_model, token_table
from trainer.batching import pack
from trainer.companions import Companions, Ewma, make_companions
from trainer.logprobs import choose_tokens, score
from trainer.losses import make_objective


@pytest.fixture
def model():
    return tiny_model()


@pytest.fixture
def batch():
    return pack(completions(), token_budget=10_000)[0]


def companions(objective, model, **changes) -> Companions:
    choices = {"initial": lambda: copy.deepcopy(model), "teacher": None, "ewma": None}
    return make_companions(objective, model, **{**choices, **changes})


@pytest.mark.parametrize(
    ("name", "params", "changes", "said"),
    [("opd", {}, {}, "trainer.teacher"), ("opd", {"actions": "teacher"}, {}, "trainer.teacher"),
     ("ppo_ewma", {}, {}, "trainer.ewma_decay")],
)  # fmt: skip
def test_what_the_run_cannot_supply_is_refused_before_the_first_step(model, name, params, changes, said):
    with pytest.raises(UserError, match=said):
        companions(make_objective(name, params), model, **changes)


def test_a_teacher_of_another_vocabulary_is_refused(model):
    other = tiny_model()
    other.resize_token_embeddings(41)
    with pytest.raises(UserError, match="41 tokens"):
        companions(make_objective("opd"), model, teacher=lambda: other)


def test_an_objective_that_needs_nothing_is_given_nothing(model, batch):
    made = companions(make_objective("ipo"), model, ewma=None)
    assert (made.reference, made.teacher, made.ewma) == (None, None, None)
    extras = made.extras(model, batch, make_objective("ipo"), 1.0, prox=False)
    assert all(getattr(extras, name) is None for name in extras.__dataclass_fields__)


def test_reference_teacher_average_and_start_are_their_models_log_probs(model, batch):
    objective = make_objective("opd", regularizers=[{"name": "reference_kl"}])
    made = companions(objective, model, teacher=lambda: copy.deepcopy(model), ewma=0.5)
    with torch.no_grad():
        expected = score(model, batch, 0.7).logprob_BT
    extras = made.extras(model, batch, objective, 0.7, prox=True, ewma=True)
    for values in (extras.prox_BT, extras.ewma_BT, extras.reference_BT, extras.teacher_BT):
        assert torch.allclose(values, expected, atol=1e-6)
        assert not values.requires_grad


def test_the_average_follows_the_weights(model):
    average = Ewma(model, decay=0.75)
    before = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        model.lm_head.weight += 1.0
    average.update(model)
    assert torch.allclose(average.model.lm_head.weight, before + 0.25, atol=1e-6)
    assert not any(parameter.requires_grad for parameter in average.model.parameters())


def test_the_average_moves_by_less_than_the_models_precision(model):
    """A weight of 1 that grows by one unit in the last place of bfloat16: a hundredth of that is none in bfloat16."""
    model = model.bfloat16()
    with torch.no_grad():
        model.lm_head.weight.fill_(1.0)
    average, resumed = Ewma(model, decay=0.99), Ewma(model, decay=0.99)
    with torch.no_grad():
        model.lm_head.weight.fill_(1.0 + 2.0**-7)
    for _ in range(50):
        average.update(model)
    exact = average.state_dict()
    assert exact["lm_head.weight"].dtype == torch.float32
    assert torch.allclose(exact["lm_head.weight"], torch.tensor(1.0 + 2.0**-7 * (1.0 - 0.99**50)), atol=1e-6)
    assert average.model.lm_head.weight.dtype == torch.bfloat16
    resumed.load_state_dict(copy.deepcopy(exact))
    for _ in range(50):
        average.update(model)
        resumed.update(model)
    assert float(average.model.lm_head.weight[0, 0]) == 1.0 + 2.0**-7, "63 % of a unit round to one"
    for name, tensor in average.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    with pytest.raises(ValueError, match="names differ"):
        resumed.load_state_dict({})
    resumed.begin(model)
    assert torch.equal(resumed.model.lm_head.weight, model.lm_head.weight)


def test_draws_come_from_the_policy_and_their_log_probs_are_its_own(model, batch):
    ids, logprobs = choose_tokens(model, batch, 1.3, 5, torch.Generator().manual_seed(0), chunk=4)
    again, _ = choose_tokens(model, batch, 1.3, 5, torch.Generator().manual_seed(0), chunk=4)
    assert torch.equal(ids, again)
    with torch.no_grad():
        scored = score(model, batch, 1.3, others_BTM=ids)
    assert torch.allclose(scored.others_BTM, logprobs, atol=1e-5)


def test_drawn_tokens_have_the_policys_frequencies(model):
    small = pack(completions(prompts=1, per_prompt=1, longest=1), token_budget=100)[0]
    ids, _ = choose_tokens(model, small, 1.0, 20_000, torch.Generator().manual_seed(1))
    likeliest, logprob = choose_tokens(model, small, 1.0, 3, None)
    share = (ids[0, 0][:, None] == likeliest[0, 0]).float().mean(dim=0)
    assert torch.allclose(share, logprob[0, 0].exp(), atol=0.01)


def test_top_k_is_the_likeliest_in_order(model, batch):
    ids, logprobs = choose_tokens(model, batch, 1.0, 3, None, chunk=3)
    assert (logprobs[batch.mask_BT].diff(dim=-1) <= 0).all()
    assert ids.shape == (*batch.mask_BT.shape, 3)


def test_entropies_and_other_tokens_have_the_same_gradient_in_chunks(model, batch):
    ids, _ = choose_tokens(model, batch, 1.0, 2, None)
    gradients = []
    for chunk in (1024, 3):
        model.zero_grad()
        scores = score(model, batch, 1.0, chunk=chunk, entropy_gradient=True, others_BTM=ids)
        (scores.entropy_BT.sum() + scores.others_BTM.sum()).backward()
        gradients.append(model.lm_head.weight.grad.clone())
    assert torch.allclose(*gradients, atol=1e-5)
    assert float(gradients[0].abs().max()) > 0.0


def test_plain_scores_need_no_gradient_of_the_entropy(model, batch):
    table, _ = token_table(model, [batch])
    scores = score(model, batch, 1.0)
    assert not scores.entropy_BT.requires_grad
    assert len(table) == int(batch.mask_BT.sum())
