"""Versions in memory, and rollouts of several spans."""

from pathlib import Path

import numpy as np
import pytest
import torch

from coordinator.verification.prefill import PrefillModel
from coordinator.verification.resident import PrefillRequest, ResidentModels, prefill_rollouts
from protocol.errors import OurFault, SourceFault
from protocol.rollout import VersionSpan
from tests.tiny_model import build_tiny_model

COMPLETION = tuple(range(40, 80))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: build_tiny_model(folder / name, seed=seed) for seed, name in enumerate("abc")}


def make_request(key: str, *spans: tuple[str, int, int]) -> PrefillRequest:
    versions = tuple(VersionSpan(ord(name), name, start, end) for name, start, end in spans)
    return PrefillRequest(key, (1, 2, 3), COMPLETION[: spans[-1][2]], 99, 1.0, versions)


def test_each_token_comes_from_the_version_that_wrote_it(folders: dict[str, Path]) -> None:
    models = ResidentModels(folders.__getitem__, max_resident=1, dtype=torch.float32)
    both = make_request("both", ("a", 0, 15), ("b", 15, 40))
    found = prefill_rollouts([both, make_request("a", ("a", 0, 40)), make_request("b", ("b", 0, 40))], models)
    for name in ("logprobs_T", "entropies_T", "margins_T"):
        expected = np.concatenate([getattr(found["a"], name)[:15], getattr(found["b"], name)[15:]])
        np.testing.assert_allclose(getattr(found["both"], name), expected, atol=2e-4)
    assert found["both"].hidden_bits_TD.shape == found["a"].hidden_bits_TD.shape
    assert np.abs(found["a"].logprobs_T - found["b"].logprobs_T).mean() > 0.5


def test_a_version_is_computed_with_as_if_loaded_alone(folders: dict[str, Path]) -> None:
    models = ResidentModels(folders.__getitem__, max_resident=2)
    for name in "abcab":
        request = make_request("r", (name, 0, 40))
        found = prefill_rollouts([request], models)["r"]
        alone = PrefillModel(folders[name]).prefill([request.item(request.spans[0])])[0]
        np.testing.assert_array_equal(found.hidden_bits_TD, alone.hidden_bits_TD)


def test_forgets_the_least_recently_used_and_reads_each_once(folders: dict[str, Path]) -> None:
    reads: list[str] = []

    def folder_of(digest: str) -> Path:
        reads.append(digest)
        return folders[digest]

    models = ResidentModels(folder_of, max_resident=2)
    for name in "aab":
        models.activate(name)
    assert models.resident == ("a", "b") and reads == ["a", "a", "b"]  # the first builds the module, too
    models.activate("a")
    models.activate("c")
    assert models.resident == ("a", "c") and models.active == "c" and reads == ["a", "a", "b", "c"]


def test_work_begins_with_what_is_in_memory(folders: dict[str, Path]) -> None:
    reads: list[str] = []

    def folder_of(digest: str) -> Path:
        reads.append(digest)
        return folders[digest]

    models = ResidentModels(folder_of, max_resident=2)
    for name in "ab":
        models.activate(name)
    reads.clear()
    prefill_rollouts([make_request(name, (name, 0, 8)) for name in "cab"], models)
    assert reads == ["c"]


def test_a_version_that_cannot_be_had_is_our_fault(folders: dict[str, Path]) -> None:
    def unreachable(digest: str) -> Path:
        raise SourceFault(f"no relay has {digest}")

    with pytest.raises(OurFault, match="no relay has a"):
        prefill_rollouts([make_request("r", ("a", 0, 4))], ResidentModels(unreachable, max_resident=1))
    broken = ResidentModels({}.__getitem__, max_resident=1)
    with pytest.raises(OurFault, match="KeyError"):
        prefill_rollouts([make_request("r", ("a", 0, 4))], broken)
