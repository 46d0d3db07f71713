"""Shared prompts give what separate rows give: log-probs, entropies and gradients."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from protocol.rollout import Rollout, RolloutGroup, Segment, StopReason, VerifiedRollout, VersionSpan
from trainer.batching import TrainSequence, pack, sequences_of
from trainer.logprobs import score

VOCABULARY = 40
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def tiny_model(kind: str = "llama"):
    torch.manual_seed(0)
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval()
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def completions(seed: int = 0, prompts: int = 3, per_prompt: int = 4, longest: int = 6) -> list[TrainSequence]:
    rng = random.Random(seed)
    result = []
    for prompt_number in range(prompts):
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(3 + prompt_number))
        for _ in range(per_prompt):
            length = rng.randint(1, longest)
            tokens = tuple(rng.randrange(VOCABULARY) for _ in range(length))
            mask = (True,) + tuple(rng.random() < 0.8 for _ in range(length - 1))
            numbers = tuple(-rng.random() for _ in range(length))
            ages = tuple(rng.randint(0, 2) for _ in range(length))
            result.append(TrainSequence(prompt, tokens, mask, numbers, numbers, ages, rng.uniform(-1, 1)))
    return result


def token_table(model, batches, temperature=1.0, chunk=1024):
    """{(tokens of the completion, position, advantage): (log-prob, entropy)} and the gradient of a weighted sum."""
    model.zero_grad()
    table = {}
    for batch in batches:
        scores = score(model, batch, temperature, chunk=chunk)
        new_BT, entropy_BT = scores.logprob_BT, scores.entropy_BT
        (new_BT * batch.advantage_BT).sum().backward()
        for b, t in batch.mask_BT.nonzero().tolist():
            key = (float(batch.advantage_BT[b, t]), t, int(batch.token_BT[b, t]))
            table[key] = (float(new_BT[b, t].detach()), float(entropy_BT[b, t]))
    return table, [parameter.grad.clone() for parameter in model.parameters()]


def assert_same(left, right):
    (left_table, left_grads), (right_table, right_grads) = left, right
    assert left_table.keys() == right_table.keys()
    for key, values in left_table.items():
        assert values == pytest.approx(right_table[key], abs=2e-5)
    for one, other in zip(left_grads, right_grads, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_shared_prompt_gives_what_separate_rows_give(kind):
    model, items = tiny_model(kind), completions()
    shared = pack(items, token_budget=200)
    separate = pack(items, token_budget=200, share_prompts=False)
    assert max(int(batch.segment_RL.max()) for batch in shared) == 4
    assert max(int(batch.segment_RL.max()) for batch in separate) == 1
    assert_same(token_table(model, shared), token_table(model, separate))


def test_separate_rows_give_what_the_model_gives_for_each_completion_alone():
    model, items = tiny_model(), completions(seed=3)
    table, _ = token_table(model, pack(items, token_budget=64, share_prompts=False), temperature=0.7)
    seen = 0
    for item in items:
        logits = model(torch.tensor([[*item.prompt_ids, *item.token_ids]])).logits[0].float() / 0.7
        logprobs = torch.log_softmax(logits.detach(), dim=-1)
        for t, token in enumerate(item.token_ids):
            if not item.loss_mask[t]:
                continue
            row = logprobs[len(item.prompt_ids) - 1 + t]
            key = next(key for key in table if key[0] == pytest.approx(item.advantage) and key[1:] == (t, token))
            assert table[key][0] == pytest.approx(float(row[token]), abs=2e-5)
            assert table[key][1] == pytest.approx(float(-(row.exp() * row).sum()), abs=2e-4)
            seen += 1
    assert seen == len(table)


def test_a_chunked_head_gives_what_the_whole_head_gives():
    model, batches = tiny_model(), pack(completions(), token_budget=200)
    assert_same(token_table(model, batches, chunk=3), token_table(model, batches))


def test_the_token_budget_holds_and_nothing_is_lost():
    items = completions(prompts=6, per_prompt=5)
    for budget in (20, 60, 1000):
        batches = pack(items, token_budget=budget, row_tokens=20)
        assert all(batch.input_RL.numel() <= budget for batch in batches)
        assert sum(int(batch.mask_BT.sum()) for batch in batches) == sum(sum(item.loss_mask) for item in items)


def test_tokens_without_loss_have_zeros_everywhere_and_empty_completions_are_left_out():
    kept = TrainSequence((1, 2), (3, 4, 5), (True, False, True), (-1.0, -2.0, -3.0), (-1.0,) * 3, (0, 1, 2), 0.5)
    unused = TrainSequence((1, 2), (3,), (False,), (-1.0,), (-1.0,), (0,), 0.5)
    (batch,) = pack([kept, unused], token_budget=100)
    assert batch.mask_BT.tolist() == [[True, False, True]]
    assert batch.old_BT.tolist() == [[-1.0, 0.0, -3.0]]
    assert batch.staleness_BT.tolist() == [[0, 0, 2]]
    assert batch.source_BT.tolist() == [[1, 0, 3]]
    assert batch.input_RL.tolist() == [[1, 2, 3, 4]]


def test_the_step_start_policy_stands_in_for_old_log_probs_of_unaudited_rollouts():
    audited = TrainSequence((1,), (2, 3), (True, True), (-1.0, -2.0), (-1.0, -1.0), (0, 0), 1.0)
    unaudited = TrainSequence((1,), (4, 5), (True, True), (), (-1.0, -1.0), (0, 0), 1.0)
    (batch,) = pack([audited, unaudited], token_budget=100)
    new_BT = torch.full((2, 2), -0.25, requires_grad=True)
    old_BT = batch.loss_inputs(new_BT).old_BT
    assert old_BT.tolist() == [[-1.0, -2.0], [-0.25, -0.25]]
    assert not old_BT.requires_grad
    assert batch.loss_inputs(new_BT, torch.full((2, 2), -0.5)).old_BT.tolist()[1] == [-0.5, -0.5]


def verified(number: int, spans: tuple[VersionSpan, ...], audited: bool = True) -> VerifiedRollout:
    rollout = Rollout(
        "run", f"lease{number}", f"s{number}", (Segment.by_model((5, 6, 7)),), (-0.1, -0.2, -0.3), spans,
        ((b"",),) * len(spans), StopReason.EOS,
    )  # fmt: skip
    return VerifiedRollout(f"r{number}", f"s{number}", "w", rollout, 1.0, (-0.1, -0.2, -0.4), audited)


def test_staleness_is_counted_per_span_from_the_trainers_version():
    spans = (VersionSpan(3, "d3", 0, 2), VersionSpan(4, "d4", 2, 3))
    group = RolloutGroup("g", "t", "arithmetic", (1, 2), 2, (verified(0, spans), verified(1, spans, audited=False)))
    first, second = sequences_of(group, [0.5, -0.5], trainer_version=5)
    assert first.staleness == (2, 2, 1)
    assert (first.old, second.old) == ((-0.1, -0.2, -0.4), ())
    assert (first.advantage, second.advantage) == (0.5, -0.5)


def test_a_rollout_whose_spans_do_not_cover_its_tokens_is_refused():
    group = RolloutGroup("g", "t", "a", (1,), 1, (verified(0, (VersionSpan(3, "d", 0, 2),)),))
    with pytest.raises(ValueError, match="2 span tokens for 3 tokens"):
        sequences_of(group, [0.0], trainer_version=3)


class MostLogits(TorchDispatchMode):
    """The most rows of a whole vocabulary that any result of an operation has."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.rows = vocabulary, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (self.vocabulary,):
                self.rows = max(self.rows, tensor.numel() // self.vocabulary)
        return result


@pytest.mark.parametrize("longest", [80, 240])
def test_no_logits_of_all_tokens_are_ever_held(longest):
    """Forward and backward, whatever the number of tokens: a chunk's logits are the most there is."""
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "vocab_size": 4000, "hidden_size": 8, "num_attention_heads": 2,
                            "num_key_value_heads": 1, "intermediate_size": 8})  # fmt: skip
    model = LlamaForCausalLM(config)
    batch = pack(completions(prompts=1, per_prompt=2, longest=longest), token_budget=10_000)[0]
    with MostLogits(4000) as most:
        score(model, batch, 1.0, chunk=16).logprob_BT.sum().backward()
    assert int(batch.mask_BT.sum()) > 16
    assert most.rows == 16


def test_recomputed_activations_give_the_same_gradients():
    model, batches = tiny_model(), pack(completions(), token_budget=10_000)
    model.train()
    table, gradients = token_table(model, batches)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same((table, gradients), token_table(model, batches))


def test_an_answer_of_a_tool_is_in_the_context_and_out_of_the_mask():
    rollout = Rollout(
        "run",
        "lease",
        "s",
        (Segment.by_model((5,)), Segment.by_environment((6, 7)), Segment.by_model((8,))),
        (-0.1, 0.0, 0.0, -0.2),
        (VersionSpan(3, "d3", 0, 3), VersionSpan(4, "d4", 3, 4)),
        ((b"",), (b"",)),
        StopReason.EOS,
    )
    item = VerifiedRollout("r", "s", "w", rollout, 1.0, (-0.1, -9.0, -9.0, -0.2), True)
    (sequence,) = sequences_of(RolloutGroup("g", "t", "sums", (1, 2), 1, (item,)), [0.5], trainer_version=5)
    (batch,) = pack([sequence], token_budget=100)
    assert batch.input_RL.tolist() == [[1, 2, 5, 6, 7]]
    assert batch.position_RL.tolist() == [[0, 1, 2, 3, 4]]
    assert batch.mask_BT.tolist() == [[True, False, False, True]]
    assert batch.source_BT.tolist() == [[1, 0, 0, 4]]
    assert batch.staleness_BT.tolist() == [[2, 0, 0, 1]]
    assert batch.old_BT.tolist() == batch.behaviour_BT.tolist() == [[pytest.approx(-0.1), 0, 0, pytest.approx(-0.2)]]
