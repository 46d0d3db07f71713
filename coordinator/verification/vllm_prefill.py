"""The prefill by a vLLM engine, for models that one transformers forward can't hold or that vLLM computes much faster.

A rollout is a request whose prompt is all of its tokens but the last, of which one more token is asked and thrown away: its
hidden states are kept inside vLLM (`vllm_extension`), and measured there. The prefix cache is off: what is cached is not
computed, and would not be seen. So a group's prompt is computed once per rollout.

Same interface as `prefill.PrefillModel`, which `resident.ResidentModels` asks for, but that versions wait on the disk: an
engine reads the weights that it is told to compute with.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.verification.prefill import DEFAULT_LOGITS_BYTES, PrefillResult
from coordinator.verification.prefill_layout import PrefillItem
from coordinator.verification.vllm_extension import TERMS_KEY
from protocol.errors import OurFault

_EXTENSION = "coordinator.verification.vllm_extension.PrefillExtension"
_KEPT_BYTES = 1 << 30  # hidden states that wait to be measured
# What vLLM reads from the environment as it starts. The extension knows the V1 runner's batches.
_ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class VllmPrefillConfig:
    """`max_model_len`: the longest prompt and completion together. `kv_cache_gib`: None for what vLLM takes of
    `gpu_memory_utilization`. `at_once`: rollouts per step; 1 computes each alone. `tensor_parallel`: accelerators.
    `max_num_batched_tokens`: of a step; None for vLLM's choice."""

    max_model_len: int
    dtype: str = "bfloat16"
    at_once: int = 64
    kv_cache_gib: float | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel: int = 1
    enforce_eager: bool = True
    max_num_batched_tokens: int | None = None


class VllmPrefill:
    """One engine. Raises OurFault if it does not start, or is of a kind that the extension does not know."""

    def __init__(self, folder: Path, config: VllmPrefillConfig) -> None:
        self._config = config
        self._folder = folder
        os.environ.update(_ENVIRONMENT)
        self._llm = _engine(folder, config)
        found = self._llm.collective_rpc("install_prefill")[0]
        if found != "v1":
            raise OurFault(f'vLLM runs {found}, which the prefill can\'t read: use engine = "transformers"')
        model = self._llm.llm_engine.model_config
        self._vocab_size, self._hidden_size = model.get_vocab_size(), model.get_hidden_size()
        self._head_rows = max(1, DEFAULT_LOGITS_BYTES // (4 * self._vocab_size))

    @property
    def vocab_size(self) -> int:
        return int(self._vocab_size)

    @property
    def hidden_size(self) -> int:
        return int(self._hidden_size)

    def read(self, folder: Path) -> Path:
        """What `put` takes: the folder itself."""
        return folder

    def put(self, state: Path) -> None:
        """Compute with another version's weights from now on; the engine is not rebuilt."""
        if state != self._folder:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(state)})
            self._folder = state

    def prefill(self, items: Sequence[PrefillItem]) -> list[PrefillResult]:
        """Measure all items, in their order. Raises OurFault if the engine computed less than was asked."""
        results: list[PrefillResult] = []
        for batch in batches(items, _KEPT_BYTES // (2 * self.hidden_size)):
            prompts, parameters = zip(*(self._request(number, item) for number, item in enumerate(batch)), strict=True)
            try:
                self._llm.generate(list(prompts), list(parameters), use_tqdm=False)
                results.extend(self._measure(number, item) for number, item in enumerate(batch))
            finally:
                self._llm.collective_rpc("drop_prefills")
        return results

    def close(self) -> None:
        """End the engine's processes. Safe to call twice."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()

    def _request(self, number: int, item: PrefillItem) -> tuple[Any, Any]:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input

        tokens = [*item.prompt_token_ids, *item.completion_token_ids[:-1]]
        first = len(item.prompt_token_ids) - 1 + item.first
        terms = {"id": str(number), "first": first, "rows": len(tokens) - first}
        parameters = SamplingParams(
            temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, extra_args={TERMS_KEY: terms}
        )
        return tokens_input(tokens), parameters

    def _measure(self, number: int, item: PrefillItem) -> PrefillResult:
        claimed = list(item.completion_token_ids[item.first :])
        arguments = (str(number), claimed, str(item.seed), item.temperature, 0, self._head_rows)
        error, *arrays = self._llm.collective_rpc("measure_prefill", args=arguments)[0]
        if error:
            raise OurFault(error)
        kinds: tuple[Any, ...] = (np.uint16, np.float32, np.float32, np.float32, np.int64, np.bool_)
        bits_ND, *columns = [np.frombuffer(array, kind) for array, kind in zip(arrays, kinds, strict=True)]
        return PrefillResult(bits_ND.reshape(len(claimed), -1), *columns)


def batches(items: Sequence[PrefillItem], rows: int) -> Iterator[list[PrefillItem]]:
    """Items in their order, as many at a time as have so many hidden states together (one, if it alone has more)."""
    batch: list[PrefillItem] = []
    used = 0
    for item in items:
        count = len(item.completion_token_ids) - item.first
        if batch and used + count > rows:
            yield batch
            batch, used = [], 0
        batch.append(item)
        used += count
    if batch:
        yield batch


def _engine(folder: Path, config: VllmPrefillConfig) -> Any:
    from vllm import LLM

    options: dict[str, Any] = {}
    if config.kv_cache_gib is not None:
        options["kv_cache_memory_bytes"] = int(config.kv_cache_gib * (1 << 30))
    if config.max_num_batched_tokens is not None:
        options["max_num_batched_tokens"] = config.max_num_batched_tokens
    try:
        return LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            load_format="safetensors",
            hf_overrides={"tie_word_embeddings": False},  # else a reload keeps the old head
            generation_config="vllm",
            trust_remote_code=False,
            dtype=config.dtype,
            enforce_eager=config.enforce_eager,
            max_model_len=config.max_model_len,
            max_num_seqs=config.at_once,
            gpu_memory_utilization=config.gpu_memory_utilization,
            tensor_parallel_size=config.tensor_parallel,
            enable_prefix_caching=False,
            worker_extension_cls=_EXTENSION,
            disable_log_stats=True,
            **options,
        )
    except Exception as error:
        raise OurFault(f"the prefill's vLLM engine did not start: {type(error).__name__}: {error}") from error
