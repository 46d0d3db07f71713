"""What is asked of an engine, and what comes of comparing: with the reference engine on a tiny model."""

import asyncio
import itertools
from pathlib import Path

import torch

from coordinator.calibration.collect import ask, compare, verifier_settings
from coordinator.calibration.run import published_form
from tests.tiny_model import EOS_TOKEN_ID, build_tiny_model
from tests.unit.coordinator.verification.claims import generate
from worker.engine import GenerationRequest, Weights
from worker.reference_engine import ReferenceEngine

PROMPTS = [((1, 2, 3), 5), ((4, 5), 6)]


def asked(count: int) -> list:
    return ask(
        itertools.cycle(PROMPTS), setting="s", count=count, group_size=4, temperature=1.0, eos_token_ids=(EOS_TOKEN_ID,)
    )


def test_half_are_asked_as_the_run_asks_and_half_fill_every_length_class() -> None:
    samples = asked(64)
    assert len({sample.seed for sample in samples}) == len({sample.key for sample in samples}) == 64
    as_the_run = [sample for sample in samples if sample.sampling.eos_token_ids]
    assert len(as_the_run) == 32 and {sample.sampling.max_tokens for sample in as_the_run} == {5, 6}
    forced = {sample.sampling.max_tokens for sample in samples if not sample.sampling.eos_token_ids}
    assert min(forced) < 5 and any(5 <= n < 16 for n in forced) and any(16 <= n < 32 for n in forced)
    assert max(forced) > 32
    assert [sample.prompt_token_ids for sample in samples[:5]] == [(1, 2, 3)] * 4 + [(4, 5)]


def test_the_second_look_is_calibrated_too() -> None:
    names = [setting.name for setting in verifier_settings(torch.bfloat16)]
    assert names == ["bfloat16, wide", "bfloat16, narrow", "float32"]
    assert [setting.name for setting in verifier_settings(torch.float32)] == ["float32, wide", "float32, narrow"]


def test_a_float32_engine_is_next_to_nothing_away_from_a_float32_prefill(tmp_path: Path) -> None:
    folder = published_form(build_tiny_model(tmp_path / "model"), tmp_path / "published")
    samples = asked(16)

    async def write() -> list:
        engine = ReferenceEngine("float32")
        await engine.start(Weights(0, "sha256:" + "0" * 64, folder))
        try:
            requests = [GenerationRequest(s.key, s.prompt_token_ids, s.sampling, s.seed) for s in samples]
            return [await generate(engine, request) for request in requests]
        finally:
            await engine.close()

    said: list[str] = []
    found = compare(
        folder,
        samples,
        asyncio.run(write()),
        engine="reference",
        verifiers=verifier_settings(torch.float32),
        device="cpu",
        progress=said.append,
    )
    assert len(found) == 32 and len(said) == 2
    assert {key for key, _ in found} == {sample.key for sample in samples}
    for _, measure in found:
        assert measure.gap_max < 1e-3 and measure.margin_max < 1e-3
        assert sum(chunk.tokens for chunk in measure.chunks) == measure.tokens
        assert all(chunk.mantissa_mean < 0.5 for chunk in measure.chunks)


def test_a_published_form_names_its_head_and_keeps_the_tokenizer(tmp_path: Path) -> None:
    from safetensors import safe_open

    folder = published_form(build_tiny_model(tmp_path / "model"), tmp_path / "published")
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        assert "lm_head.weight" in set(tensors.keys())
    kept = {file.name for file in (tmp_path / "model").iterdir() if file.suffix != ".safetensors"}
    assert kept == {file.name for file in folder.iterdir() if file.suffix != ".safetensors"}
