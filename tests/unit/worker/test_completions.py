"""Completions by the reference engine: the samples asked for, by seeds that hang on nothing but their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import UserError
from tests.factories import make_terms
from tests.tiny_model import EOS_TOKEN_ID, build_tiny_model
from worker.completions import EngineSampler, engine_sampler, sample_seed
from worker.config import WorkerConfig
from worker.doctor.checks import versions
from worker.join import vllm_engine
from worker.reference_engine import ReferenceEngine
from worker.vllm_engine import installed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


async def test_each_prompt_gets_its_samples_and_they_are_the_same_again(model: Path) -> None:
    longest: list[int] = []

    def make(tokens: int) -> ReferenceEngine:
        longest.append(tokens)
        return ReferenceEngine("float32")

    sampler = EngineSampler(make)
    await sampler.start(model, 12)
    how = {"temperature": 1.0, "max_tokens": 4, "eos_token_ids": (EOS_TOKEN_ID,), "seed": 3}
    both = await sampler.complete([(1, 2, 3), (4, 5)], samples=2, **how)
    first = await sampler.complete([(1, 2, 3)], samples=1, **how)
    await sampler.close()
    await sampler.close()
    assert longest == [12]
    assert [len(samples) for samples in both] == [2, 2]
    assert all(1 <= len(tokens) <= 4 for samples in both for tokens in samples)
    assert first[0][0] == both[0][0], "not changed by what is written beside it"
    assert len({tuple(tokens) for samples in both for tokens in samples}) == 4


def test_no_two_places_share_a_seed() -> None:
    seeds = {sample_seed(seed, place, number) for seed in range(3) for place in range(5) for number in range(4)}
    assert len(seeds) == 60
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_whoever_needs_vllm_says_the_same_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    with pytest.raises(UserError) as joining:
        vllm_engine(WorkerConfig(), make_terms())
    with pytest.raises(UserError) as evaluating:
        engine_sampler("vllm", 8)
    finding = versions("0.1.0", None, None)
    assert str(joining.value) == str(evaluating.value) == f"{finding.text}: {finding.remedy}"
