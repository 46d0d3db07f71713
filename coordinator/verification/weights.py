"""Reading a policy version's folder, and a module to put it into.

The LM head is always its own parameter, also for models whose configuration ties it to the embedding: a published
version names `lm_head.weight` explicitly, and what it names is what the workers' engines compute with. A folder without
it gets a copy of its embedding.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from protocol.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

State = dict[str, torch.Tensor]

_SUPPORTED_ONLY_WITHOUT = ("final_logit_softcapping", "logits_scaling", "logit_scale")


class WideLinear(nn.Linear):
    """A bf16 linear layer computed in float32: products of bf16 numbers are exact there, and the sum is rounded once.

    That is what bf16 matrix units do (multiply exactly, accumulate in float32, round the result), at several times the
    speed of bf16 kernels on processors without such units. Its weight holds bf16 numbers as float32.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input.float(), self.weight, self.bias).to(input.dtype)


def build_module(folder: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The model of a Hugging Face folder, ready to compute. Never runs code from the folder.

    Raises UserError if the folder does not hold a causal language model of a known architecture in safetensors.
    """
    model = _from_pretrained(folder, dtype).to(device)  # type: ignore[arg-type]
    if dtype == torch.bfloat16 and torch.device(device).type == "cpu" and not cpu_has_bf16_units():
        _widen(model)
    model.eval().requires_grad_(False)
    return model


def read_state(folder: Path, names: set[str]) -> State:
    """The tensors of a version as stored, for a module whose parameters have these names."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} holds no .safetensors file; is it a published version?")
    state: State = {}
    for file in files:
        state.update(load_file(file))
    state = _with_head(state, names)
    if state.keys() == names:
        return state
    # Some architectures are stored in another layout than they compute in; transformers knows the conversions.
    converted = _from_pretrained(folder, torch.bfloat16).state_dict()
    if converted.keys() != names:
        odd = sorted(converted.keys() ^ names)[:3]
        raise UserError(f"{folder} is another architecture than the run's model: {', '.join(odd)} …")
    return converted


def put_state(module: nn.Module, state: State) -> None:
    """Copy a version's tensors into the module's own, converting dtype and device; nothing is rebuilt."""
    with torch.no_grad():
        for name, parameter in module.state_dict(keep_vars=True).items():
            if parameter.shape != state[name].shape:
                shapes = f"{tuple(state[name].shape)}, the run's model has {tuple(parameter.shape)}"
                raise UserError(f"{name} has shape {shapes}; is it a version of this run?")
            parameter.copy_(state[name])


def cpu_has_bf16_units() -> bool:
    """Whether this CPU multiplies bf16 natively (AVX512-BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _from_pretrained(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        _refuse_unsupported(config, folder)
        config.tie_word_embeddings = config.tie_word_embeddings and not _names_head(folder)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load a model from {folder}: {str(error).splitlines()[0]}") from error
    _untie_head(model)
    return model


def _untie_head(model: PreTrainedModel) -> None:
    head: Any = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.detach().clone())
    model.config.tie_word_embeddings = False


def _refuse_unsupported(config: Any, folder: Path) -> None:
    for name in _SUPPORTED_ONLY_WITHOUT:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise UserError(f"{folder}: models with {name} are not supported by the verifier yet")


def _names_head(folder: Path) -> bool:
    from safetensors import safe_open

    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names = set(tensors.keys())
        if "lm_head.weight" in names:
            return True
    return False


def _with_head(state: State, names: set[str]) -> State:
    """Add the LM head of a tied checkpoint that leaves it out."""
    if "lm_head.weight" in names and "lm_head.weight" not in state:
        embeddings = [tensor for name, tensor in state.items() if name.endswith("embed_tokens.weight")]
        if len(embeddings) == 1:
            return {**state, "lm_head.weight": embeddings[0]}
    return state


def _widen(model: nn.Module) -> None:
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = WideLinear
            layer.float()
