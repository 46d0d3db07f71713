"""Tiny random Llama folders for tests: real config, weights and tokenizer files, made in well under a second.

Logits spread like a trained model's (a standard deviation of about 2), so that seeds, temperatures and log-probs matter.
The LM head is untied and explicit, as every published checkpoint's must be.
"""

from __future__ import annotations

import json
from pathlib import Path

from worker.engine import Weights

VOCABULARY = 260  # 256 bytes, then the special tokens
EOS_TOKEN_ID = 256
PAD_TOKEN_ID = 257
BOS_TOKEN_ID = 258
HIDDEN_SIZE = 128
LAYERS = 2

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def build_tiny_model(folder: Path, *, seed: int = 0, max_positions: int = 1024) -> Path:
    """Write a Hugging Face folder, the same for the same seed; returns it."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        bos_token_id=BOS_TOKEN_ID,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=PAD_TOKEN_ID,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    generator = torch.Generator().manual_seed(seed)
    weights = {name: _tensor(name, shape, generator) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder)
    return folder


def build_other_tiny_model(folder: Path) -> Path:
    """A model of the same shape that agrees with `build_tiny_model`'s in nothing."""
    return build_tiny_model(folder, seed=1)


def _tensor(name: str, shape, generator):  # type: ignore[no-untyped-def]
    import torch

    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return (1 + 0.1 * noise).to(torch.bfloat16)
    scale = {"model.embed_tokens.weight": 1.0, "lm_head.weight": 0.2}.get(name, 0.08)
    return (scale * noise).to(torch.bfloat16)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|eos|>", "<|pad|>", "<|bos|>", "<|unused|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "bos_token": "<|bos|>",
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def build_two_versions(folder: Path) -> tuple[Weights, Weights]:
    """Versions 0 and 1 of a policy, far apart."""
    first, second = build_tiny_model(folder / "0"), build_other_tiny_model(folder / "1")
    return Weights(0, "sha256:" + "0" * 64, first), Weights(1, "sha256:" + "1" * 64, second)
