"""Completions by the reference engine: the samples asked for, by seeds that hang on nothing but their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_model import EOS_TOKEN_ID, build_tiny_model
from worker.completions import EngineSampler, sample_seed
from worker.reference_engine import ReferenceEngine


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
