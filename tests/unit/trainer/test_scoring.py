"""Evaluation: batched generation against the plain way, pass@k and paired intervals."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.scoring import average_at_n, generate_completions, paired_difference, pass_at_k

PROMPTS = [[3, 4, 5], [7], [9, 2, 4, 4, 1], [8, 8]]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=24, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3)  # fmt: skip
    return LlamaForCausalLM(config).eval()


def plainly(model, prompt, max_tokens, eos):
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


def test_greedy_batches_with_padding_give_what_one_prompt_alone_gives(model):
    alone = [plainly(model, prompt, 6, ()) for prompt in PROMPTS]
    eos = (alone[0][2],)
    expected = [plainly(model, prompt, 6, eos) for prompt in PROMPTS]
    got = generate_completions(model, PROMPTS, temperature=0.0, max_tokens=6, eos_token_ids=eos, samples=2)
    assert got == [[tokens, tokens] for tokens in expected]
    assert min(len(tokens) for tokens in expected) < 6
    split = generate_completions(model, PROMPTS, temperature=0.0, max_tokens=6, eos_token_ids=eos, batch_size=3)
    assert [tokens for [tokens] in split] == expected


def test_samples_follow_the_models_distribution_and_the_seed(model):
    def draw(seed):
        return generate_completions(
            model, [PROMPTS[0]], temperature=0.8, max_tokens=1, eos_token_ids=(), seed=seed, samples=4000
        )[0]

    first = draw(1)
    assert draw(1) == first
    assert draw(2) != first
    with torch.no_grad():
        expected = torch.softmax(model(torch.tensor([PROMPTS[0]])).logits[0, -1] / 0.8, dim=-1)
    counts = torch.bincount(torch.tensor([tokens[0] for tokens in first]), minlength=24) / 4000
    assert float((counts - expected).abs().sum()) < 0.1


def test_the_model_is_left_in_the_mode_it_was_in(model):
    model.train()
    generate_completions(model, [[1]], temperature=0.0, max_tokens=1, eos_token_ids=())
    assert model.training
    model.eval()


def test_pass_at_k_by_hand():
    """2 of 4 right: pass@1 = 1/2, pass@2 = 1 − C(2,2)/C(4,2) = 5/6."""
    scores = [[1.0, 0.0, 1.0, 0.0]]
    assert average_at_n(scores) == 0.5
    assert pass_at_k(scores, 1) == pytest.approx(0.5)
    assert pass_at_k(scores, 2) == pytest.approx(5 / 6)
    assert pass_at_k([*scores, [0.0] * 4], 4) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="pass@5"):
        pass_at_k(scores, 5)


def test_the_paired_interval_covers_what_the_normal_one_does():
    before = [0.0, 1.0] * 100
    after = [1.0, 1.0, 0.0, 1.0, 1.0] * 40
    difference = paired_difference(before, after)
    differences = torch.tensor(after) - torch.tensor(before)
    half = 1.96 * float(differences.std()) / 200**0.5
    assert difference.mean == pytest.approx(float(differences.mean()))
    assert difference.low == pytest.approx(difference.mean - half, abs=0.01)
    assert difference.high == pytest.approx(difference.mean + half, abs=0.01)
    assert paired_difference(before, after) == difference


def test_the_interval_of_a_constant_difference_has_no_width():
    difference = paired_difference([0.0, 0.0], [1.0, 1.0])
    assert (difference.mean, difference.low, difference.high) == (1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="same tasks"):
        paired_difference([1.0], [1.0, 0.0])
