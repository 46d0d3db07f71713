"""The prefill by vLLM against the one by transformers: the same numbers, whatever the batch, the version and the span."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from coordinator.verification.prefill import PrefillModel, PrefillResult
from coordinator.verification.prefill_layout import PrefillItem
from coordinator.verification.resident import PrefillRequest, ResidentModels, prefill_rollouts
from coordinator.verification.vllm_prefill import VllmPrefill, VllmPrefillConfig
from protocol.errors import OurFault
from protocol.rollout import VersionSpan
from tests.adversary.attacks.cheat import Cheat
from tests.adversary.batch import write_all
from tests.tiny_model import build_two_versions
from tests.unit.coordinator.verification.claims import make_request
from worker.engine import Weights

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Weights, Weights]:
    return build_two_versions(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def engine(versions: tuple[Weights, Weights]) -> Iterator[VllmPrefill]:
    """Four at a time, in steps of 64 tokens at most, so that prompts are prefilled in chunks and batches are mixed."""
    engine = VllmPrefill(
        versions[0].path,
        VllmPrefillConfig(max_model_len=512, kv_cache_gib=0.01, at_once=4, max_num_batched_tokens=64),
    )
    yield engine
    engine.close()
    engine.close()


def items(written: Weights, scratch: Path) -> list[PrefillItem]:
    """Honest completions of that version, at two temperatures, and one that nobody wrote, of some 200 tokens."""
    found: list[PrefillItem] = []
    for number, temperature in enumerate((0.7, 1.3)):
        requests = [make_request(6 * number + n, max_tokens=70, temperature=temperature) for n in range(6)]
        for request, generation in zip(requests, write_all(Cheat(), requests, written, scratch), strict=True):
            tokens = generation.token_ids
            first = len(tokens) // 2 if len(found) % 3 == 0 else 0
            found.append(
                PrefillItem(request.request_id, request.prompt_token_ids, tokens, request.seed, temperature, first)
            )
    tokens = tuple(map(int, np.random.default_rng(3).integers(0, 256, 200)))
    return [*found, PrefillItem("noise", (7,), tokens, 2**62 + 5, 1.0)]


def widest(found: PrefillResult, expected: PrefillResult, name: str) -> float:
    return float(np.abs(getattr(found, name) - getattr(expected, name)).max())


def values(bits_TD: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits_TD.astype(np.uint32) << 16).view(np.float32)


def assert_agree(found: PrefillResult, expected: PrefillResult) -> None:
    """As two engines in bf16 agree: other weights, or a row off by one, would differ by whole units."""
    assert found.hidden_bits_TD.shape == expected.hidden_bits_TD.shape
    gap = np.abs(values(found.hidden_bits_TD) - values(expected.hidden_bits_TD))
    assert gap.max() < 0.25 and gap.mean() < 0.01
    assert widest(found, expected, "logprobs_T") < 0.25
    assert widest(found, expected, "entropies_T") < 0.1
    assert widest(found, expected, "margins_T") < 0.3
    # Near ties fall either way; a short completion may hold one of them among few tokens.
    assert (found.winners_T != expected.winners_T).sum() <= max(1, 0.1 * len(found))
    assert (found.near_T != expected.near_T).sum() <= max(2, 0.2 * len(found))


def test_activations_logprobs_entropies_and_margins_agree(
    engine: VllmPrefill, versions: tuple[Weights, Weights], tmp_path: Path
) -> None:
    for weights in (*versions, versions[0]):
        engine.put(engine.read(weights.path))
        asked = items(weights, tmp_path)
        for found, expected in zip(engine.prefill(asked), PrefillModel(weights.path).prefill(asked), strict=True):
            assert found.finite
            assert_agree(found, expected)


def test_spans_of_two_versions_are_each_measured_under_their_own(
    engine: VllmPrefill, versions: tuple[Weights, Weights]
) -> None:
    tokens = tuple(map(int, np.random.default_rng(4).integers(0, 256, 60)))
    spans = (
        VersionSpan(0, versions[0].manifest_digest, 0, 25),
        VersionSpan(1, versions[1].manifest_digest, 25, 60),
    )
    request = PrefillRequest("r", (1, 2, 3), tokens, 5, 1.0, spans)
    folders = {weights.manifest_digest: weights.path for weights in versions}
    by_engine = ResidentModels(folders.__getitem__, max_resident=1, build=lambda _: engine)
    by_torch = ResidentModels(folders.__getitem__, max_resident=2)
    assert_agree(prefill_rollouts([request], by_engine)["r"], prefill_rollouts([request], by_torch)["r"])


def test_what_the_engine_can_not_take_is_our_fault_and_it_goes_on(engine: VllmPrefill) -> None:
    long = PrefillItem("long", (1,), (2,) * 600, 5, 1.0)
    models = ResidentModels(lambda _: Path(), max_resident=1, build=lambda _: engine)
    span = VersionSpan(0, "sha256:x", 0, 600)
    models.activate = lambda _: engine  # type: ignore[method-assign, assignment]
    with pytest.raises(OurFault, match="prefill failed"):
        prefill_rollouts(
            [PrefillRequest("long", long.prompt_token_ids, long.completion_token_ids, 5, 1.0, (span,))], models
        )
    short = PrefillItem("short", (1,), (2, 3), 5, 1.0)
    assert len(engine.prefill([short])[0]) == 2
