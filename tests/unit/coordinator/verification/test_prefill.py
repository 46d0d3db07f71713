"""Batched prefill against the plain way: one forward per rollout, prompt included."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from coordinator.verification.prefill import PrefillModel, PrefillResult, takes_packed_rows
from coordinator.verification.prefill_layout import PrefillItem
from protocol import gumbel
from tests.tiny_model import HIDDEN_SIZE, VOCABULARY, build_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "0")


@pytest.fixture(scope="module")
def exact(folder: Path) -> PrefillModel:
    return PrefillModel(folder, dtype=torch.float32)


def make_items() -> list[PrefillItem]:
    """Groups with common prompts, prompts of one token, completions from 1 to 70 tokens, two temperatures."""
    draw = np.random.default_rng(3)
    prompts = [tuple(map(int, draw.integers(0, VOCABULARY, length))) for length in (1, 9, 30)]
    lengths = [1, 5, 6, 70, 3, 33, 1, 8, 20]
    return [
        PrefillItem(
            f"r{i}",
            prompts[i % 3],
            tuple(map(int, draw.integers(0, VOCABULARY, length))),
            seed=int(draw.integers(0, 2**63 - 1)),
            temperature=(1.0, 0.7)[i % 2],
        )
        for i, length in enumerate(lengths)
    ]


def plainly(folder: Path, item: PrefillItem, dtype: torch.dtype) -> dict[str, np.ndarray]:
    """The same numbers from transformers alone, one rollout at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, tie_word_embeddings=False).eval()
    start = len(item.prompt_token_ids) - 1
    with torch.inference_mode():
        tokens = torch.tensor([[*item.prompt_token_ids, *item.completion_token_ids][:-1]])
        hidden_TD = model.model(tokens).last_hidden_state[0, start:]
        logits_TV = model.lm_head(hidden_TD).float()
    scores_TV = (logits_TV / item.temperature).log_softmax(-1)
    claimed_T = torch.tensor(item.completion_token_ids)
    return {
        "hidden": hidden_TD.float().numpy(),
        "logprobs": scores_TV.gather(1, claimed_T[:, None])[:, 0].numpy(),
        "entropies": -(scores_TV.exp() * scores_TV).sum(-1).numpy(),
        "margins": gumbel.margins(
            logits_TV.numpy(),
            seed=item.seed,
            first_position=start,
            token_ids_T=claimed_T.numpy(),
            temperature=item.temperature,
        ),
    }


def as_floats(result: PrefillResult) -> np.ndarray:
    return (result.hidden_bits_TD.astype(np.uint32) << 16).view(np.float32)


def test_equals_the_plain_way_in_float32(folder: Path, exact: PrefillModel) -> None:
    items = make_items()
    for item, result in zip(items, exact.prefill(items), strict=True):
        plain = plainly(folder, item, torch.float32)
        np.testing.assert_allclose(as_floats(result), plain["hidden"], rtol=2**-8, atol=1e-4)  # rounded to bf16
        np.testing.assert_allclose(result.logprobs_T, plain["logprobs"], atol=2e-4)
        np.testing.assert_allclose(result.entropies_T, plain["entropies"], atol=2e-4)
        np.testing.assert_allclose(result.margins_T, plain["margins"], atol=4e-4)


@pytest.mark.parametrize("native", [True, False], ids=["bf16-units", "emulated"])
def test_bf16_stays_as_close_to_the_plain_way_as_bf16_allows(
    folder: Path, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.verification.weights.cpu_has_bf16_units", lambda: native)
    items = make_items()
    results = PrefillModel(folder).prefill(items)
    for item, result in zip(items, results, strict=True):
        plain = plainly(folder, item, torch.bfloat16)
        error = np.linalg.norm(as_floats(result) - plain["hidden"]) / np.linalg.norm(plain["hidden"])
        assert error < 0.02
        assert np.abs(result.logprobs_T - plain["logprobs"]).max() < 0.15


@pytest.mark.parametrize("shared_min", [-1.0, 1.0], ids=["each-prompt-once", "each-rollout-whole"])
def test_packed_rows_and_padded_batches_say_the_same(
    exact: PrefillModel, monkeypatch: pytest.MonkeyPatch, shared_min: float
) -> None:
    items = make_items()
    packed = exact.prefill(items)
    monkeypatch.setattr(exact, "_packs", False)
    monkeypatch.setattr("coordinator.verification.prefill._SHARED_MIN", shared_min)
    for one, other in zip(packed, exact.prefill(items), strict=True):
        np.testing.assert_allclose(one.logprobs_T, other.logprobs_T, atol=1e-4)
        np.testing.assert_allclose(one.entropies_T, other.entropies_T, atol=1e-4)
        np.testing.assert_allclose(one.margins_T, other.margins_T, atol=2e-4)


@pytest.mark.parametrize(
    ("config", "packs"),
    [
        ({}, True),
        ({"layer_types": ["full_attention"] * 2}, True),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4096}, True),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}, False),
        ({"layer_types": ["linear_attention", "full_attention"]}, False),
    ],
)
def test_only_models_of_plain_attention_take_packed_rows(config: dict[str, object], packs: bool) -> None:
    assert takes_packed_rows(SimpleNamespace(**config)) is packs


def test_batching_and_head_blocks_change_nothing(folder: Path, exact: PrefillModel) -> None:
    small = PrefillModel(folder, dtype=torch.float32, token_budget=80, logits_bytes=4 * VOCABULARY * 3)
    items = make_items()
    for one, other in zip(exact.prefill(items), small.prefill(items), strict=True):
        np.testing.assert_allclose(one.logprobs_T, other.logprobs_T, atol=1e-4)
        np.testing.assert_allclose(one.margins_T, other.margins_T, atol=2e-4)


def test_first_leaves_out_what_another_version_wrote(exact: PrefillModel) -> None:
    whole = make_items()[3]
    part = PrefillItem(
        "part", whole.prompt_token_ids, whole.completion_token_ids, whole.seed, whole.temperature, first=50
    )
    all_of_it, rest = exact.prefill([whole, part])
    assert rest.hidden_bits_TD.shape == (20, HIDDEN_SIZE)
    np.testing.assert_allclose(rest.logprobs_T, all_of_it.logprobs_T[50:], atol=1e-4)
    np.testing.assert_allclose(rest.margins_T, all_of_it.margins_T[50:], atol=2e-4)


def test_weights_put_in_place_equals_loading_anew(folder: Path, tmp_path: Path) -> None:
    other = build_tiny_model(tmp_path / "1", seed=1)
    model, items = PrefillModel(folder), make_items()
    before = model.prefill(items)[3]
    model.put(model.read(other))
    swapped, anew = model.prefill(items)[3], PrefillModel(other).prefill(items)[3]
    np.testing.assert_array_equal(swapped.hidden_bits_TD, anew.hidden_bits_TD)
    np.testing.assert_array_equal(swapped.logprobs_T, anew.logprobs_T)
    assert np.abs(before.logprobs_T - swapped.logprobs_T).mean() > 0.5


@pytest.mark.parametrize("head_named", [True, False], ids=["explicit-head", "no-head"])
def test_a_tied_config_takes_the_head_that_was_published(folder: Path, tmp_path: Path, head_named: bool) -> None:
    import json
    import shutil

    from safetensors.torch import load_file, save_file

    tied = tmp_path / "tied"
    shutil.copytree(folder, tied)
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    state = {name: tensor.clone() for name, tensor in load_file(tied / "model.safetensors").items()}
    if not head_named:
        del state["lm_head.weight"]
    save_file(state, tied / "model.safetensors", metadata={"format": "pt"})
    built = PrefillModel(tied)
    put = PrefillModel(folder)
    put.put(put.read(tied))
    items = make_items()
    for model in (built, put):
        same_head = np.allclose(
            model.prefill(items)[3].logprobs_T, PrefillModel(folder).prefill(items)[3].logprobs_T, atol=1e-3
        )
        assert same_head is head_named
    np.testing.assert_array_equal(built.prefill(items)[3].logprobs_T, put.prefill(items)[3].logprobs_T)


def test_refuses_tokens_that_the_form_check_would_not_let_through(exact: PrefillModel) -> None:
    for prompt, completion in (((1,), (VOCABULARY,)), ((-1,), (3,)), ((), (3,)), ((1,), ())):
        with pytest.raises(ValueError, match="item 'r'"):
            exact.prefill([PrefillItem("r", prompt, completion, 0, 1.0)])


def test_an_empty_folder_and_another_architecture_are_the_users_mistake(exact: PrefillModel, tmp_path: Path) -> None:
    from protocol.errors import UserError

    with pytest.raises(UserError, match=r"no \.safetensors file"):
        exact.put(exact.read(tmp_path))
    with pytest.raises(UserError, match="cannot load a model"):
        PrefillModel(tmp_path)


def test_finite_notices_nan_and_infinity() -> None:
    good = PrefillResult(
        np.full((2, 3), 0x3F80, np.uint16),
        *(np.zeros(2, np.float32) for _ in range(3)),
        np.zeros(2, np.int64),
        np.zeros(2, np.bool_),
    )
    assert good.finite
    assert not replace(good, hidden_bits_TD=np.array([[0x7F80, 0, 0], [0, 0, 0]], np.uint16)).finite
    assert not replace(good, logprobs_T=np.array([0, np.nan], np.float32)).finite
