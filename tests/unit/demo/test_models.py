"""The tiny model's parts; making it is left to the demonstration itself, which takes its time."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import LlamaForCausalLM

from demo.models import (
    TINY_EOS_TOKEN_IDS,
    _sloppy_answer,
    _taught_pairs,
    answer_probability,
    make_tiny,
    tiny_config,
    tiny_tokenizer,
)
from environments.arithmetic import Arithmetic
from environments.registry import make_environment


def test_the_tokenizer_covers_the_prompts_and_gives_them_back():
    tokenizer = tiny_tokenizer()
    for name in ("arithmetic", "counting"):
        for text in (make_environment(name).task(3).prompt, " 48", " 9, 10, 11,"):
            ids = tokenizer(text).input_ids
            assert tokenizer.decode(ids) == text
            assert tokenizer.unk_token_id not in ids
    assert tokenizer("<end>").input_ids == list(TINY_EOS_TOKEN_IDS) == [tokenizer.eos_token_id]
    assert tokenizer.decode([*tokenizer(" 48").input_ids, 0], skip_special_tokens=True) == " 48"
    assert len(tokenizer) <= tiny_config().vocab_size


def test_the_model_suits_proofs_and_attention_kernels():
    config = tiny_config()
    assert config.hidden_size >= 128
    assert config.hidden_size // config.num_attention_heads == 64
    assert not config.tie_word_embeddings
    assert sum(parameter.numel() for parameter in LlamaForCausalLM(config).parameters()) < 1_000_000


def test_no_held_out_sum_is_taught():
    environment = Arithmetic()
    held_out = {environment.eval_task(i).prompt for i in range(environment.eval_size)}
    taught = {f"Question: What is {a} + {b}?\nAnswer:" for a, b in _taught_pairs()}
    assert len(taught) == 39 * 39 - 200
    assert taught.isdisjoint(held_out)


def test_a_sloppy_answer_is_right_one_time_in_four():
    rng = random.Random(0)
    answers = [_sloppy_answer(20, rng) for _ in range(2000)]
    assert answers.count(" 20") / 2000 == pytest.approx(0.25, abs=0.03)
    assert answers.count(" 20 ?") / 2000 == pytest.approx(0.25, abs=0.03)


def test_the_probability_of_an_answer_is_the_product_of_its_tokens():
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config()).eval()
    prompt, answer = [5, 6, 7], [8, 9]
    with torch.no_grad():
        probability_LV = torch.softmax(model(torch.tensor([prompt + answer])).logits[0], dim=-1)
    expected = float(probability_LV[2, 8] * probability_LV[3, 9])
    longer = ([5, 6, 7, 8], [1, 2, 3, 4])
    assert answer_probability(model, [(prompt, answer)]) == pytest.approx(expected, rel=1e-4)
    both = answer_probability(model, [(prompt, answer), longer])
    assert both == pytest.approx((expected + answer_probability(model, [longer])) / 2, rel=1e-4)


def test_a_model_that_is_there_is_not_made_again(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"present")
    assert make_tiny(tmp_path) == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
