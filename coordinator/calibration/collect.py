"""Honest rollouts to calibrate on: which are asked of the engine, and how each compares with each verifier setting."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import torch

from coordinator.calibration.measures import Measure, measure
from coordinator.verification.examination import TRANSFORMERS, VLLM
from coordinator.verification.prefill import PrefillModel, PrefillResult
from coordinator.verification.prefill_layout import PrefillItem
from protocol.rollout import Rollout, SamplingParams, Segment, StopReason, VersionSpan

# A chunk of 32 tokens is a whole one; the others fill the length classes below it, whatever the model would say.
_FORCED_LENGTHS = (3, 4, 6, 12, 20, 31, 48)


@dataclass(frozen=True, slots=True)
class Asked:
    """One sample as the engine gets it. `key` names it in this calibration."""

    key: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int


class Written(Protocol):
    """What an engine gives back: see worker.engine.Generation."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def logprobs(self) -> tuple[float, ...]: ...
    @property
    def spans(self) -> tuple[VersionSpan, ...]: ...
    @property
    def proofs(self) -> tuple[tuple[bytes, ...], ...]: ...
    @property
    def stop_reason(self) -> StopReason: ...


@dataclass(frozen=True, slots=True)
class VerifierSetting:
    """How the verifier computes. `token_budget`: of one forward, so that batches are wide or of one rollout each.
    `engine`: "transformers", or "vllm" with `at_once` rollouts per step instead."""

    name: str
    dtype: torch.dtype
    token_budget: int = 0
    engine: str = TRANSFORMERS
    at_once: int = 0


def verifier_settings(dtype: torch.dtype, engine: str = TRANSFORMERS) -> tuple[VerifierSetting, ...]:
    """The run's own precision in wide and in narrow batches, and what takes the second look: float32, or vLLM's narrow."""
    name = str(dtype).removeprefix("torch.")
    if engine == VLLM:
        wide, alone = (VerifierSetting(f"vllm {name}, {n} at once", dtype, engine=VLLM, at_once=n) for n in (64, 1))
        return wide, alone
    own = (VerifierSetting(f"{name}, wide", dtype, 16_384), VerifierSetting(f"{name}, narrow", dtype, 1))
    return own if dtype == torch.float32 else (*own, VerifierSetting("float32", torch.float32, 16_384))


def ask(
    prompts: Iterator[tuple[tuple[int, ...], int]],
    *,
    setting: str,
    count: int,
    group_size: int,
    temperature: float,
    eos_token_ids: tuple[int, ...],
) -> list[Asked]:
    """`count` samples: half as the run asks them, half without an EOS, at lengths of every class.

    `prompts` gives (token ids, max_tokens) of the run's tasks. Seeds follow from the setting and the number.
    """
    asked: list[Asked] = []
    lengths = itertools.cycle(_FORCED_LENGTHS)
    while len(asked) < count:
        prompt, max_tokens = next(prompts)
        for _ in range(min(group_size, count - len(asked))):
            number = len(asked)
            as_the_run = SamplingParams(temperature, max_tokens, eos_token_ids)
            forced = SamplingParams(temperature, next(lengths), ())
            seed = int.from_bytes(sha256(f"{setting}/{number}".encode()).digest()[:8], "little") >> 1
            asked.append(Asked(f"{setting}/{number}", prompt, forced if number % 2 else as_the_run, seed))
    return asked


def compare(
    folder: Path,
    asked: Sequence[Asked],
    written: Sequence[Written],
    *,
    engine: str,
    verifiers: Sequence[VerifierSetting],
    device: str,
    progress: Callable[[str], None],
) -> list[tuple[str, Measure]]:
    """(key, measure) of every rollout under every verifier setting."""
    items = [
        PrefillItem(each.key, each.prompt_token_ids, answer.token_ids, each.seed, each.sampling.temperature)
        for each, answer in zip(asked, written, strict=True)
    ]
    measures: list[tuple[str, Measure]] = []
    for setting in verifiers:
        progress(f"engine {engine}: verifying {len(items)} rollouts, {setting.name}")
        for each, answer, result in zip(asked, written, _prefill(folder, items, setting, device), strict=True):
            rollout = _rollout(each, answer)
            measures.append((each.key, measure(rollout, result, engine=engine, verifier=setting.name)))
    return measures


def _prefill(folder: Path, items: Sequence[PrefillItem], setting: VerifierSetting, device: str) -> list[PrefillResult]:
    if setting.engine != VLLM:
        model = PrefillModel(folder, dtype=setting.dtype, device=device, token_budget=setting.token_budget)
        return model.prefill(items)
    from coordinator.verification.vllm_prefill import VllmPrefill, VllmPrefillConfig

    longest = max(len(item.prompt_token_ids) + len(item.completion_token_ids) for item in items)
    dtype = str(setting.dtype).removeprefix("torch.")
    engine = VllmPrefill(
        folder,
        VllmPrefillConfig(longest, dtype=dtype, at_once=setting.at_once, kv_cache_gib=2.0 if device == "cpu" else None),
    )
    try:
        return engine.prefill(items)
    finally:
        engine.close()


def _rollout(asked: Asked, written: Written) -> Rollout:
    return Rollout(
        run_id="calibration",
        lease_id=asked.key,
        sample_id=asked.key,
        segments=(Segment.by_model(written.token_ids),),
        logprobs=written.logprobs,
        spans=written.spans,
        proofs=written.proofs,
        stop_reason=written.stop_reason,
    )
