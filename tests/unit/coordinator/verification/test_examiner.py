"""What the verifier's child does: prefill, checks, and nobody taken down by a neighbour."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.store.rollouts import PendingRollout
from coordinator.verification.examination import VLLM, ExaminerSettings
from coordinator.verification.examiner import Examiner
from coordinator.verification.resident import ResidentModels
from protocol.rollout import Outcome
from tests.adversary.attacks.cheat import Cheat
from tests.adversary.batch import write_all
from tests.thresholds import BY_HAND
from tests.tiny_model import EOS_TOKEN_ID, HIDDEN_SIZE, VOCABULARY, build_tiny_model
from tests.unit.coordinator.verification.claims import make_claim, make_request
from worker.engine import Weights

SETTINGS = ExaminerSettings(1.0, (EOS_TOKEN_ID,), VOCABULARY, HIDDEN_SIZE, {"bf16": BY_HAND})


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(0, "sha256:" + "0" * 64, build_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def pending(published: Weights, tmp_path_factory: pytest.TempPathFactory) -> list[PendingRollout]:
    """Four honest rollouts."""
    requests = [make_request(number, max_tokens=12) for number in range(4)]
    written = write_all(Cheat(), requests, published, tmp_path_factory.mktemp("scratch"))
    claims = [make_claim(*pair) for pair in zip(written, requests, strict=True)]
    return [
        PendingRollout(
            f"r{n}", "w", claim.rollout, "g0", "e", 0, "p", claim.prompt_token_ids, "1", 12, claim.seed, 1, True
        )
        for n, claim in enumerate(claims)
    ]


def test_honest_rollouts_are_accepted_by_either_look(published: Weights, pending: list[PendingRollout]) -> None:
    examiner = Examiner(SETTINGS)
    examiner.warm_up(published.manifest_digest, published.path)
    for exact in (False, True):
        found = examiner.examine(pending, {published.manifest_digest: published.path}, exact=exact)
        assert {verdict.outcome for verdict in found.values()} == {Outcome.ACCEPTED}
        assert all(len(found[item.rollout_id].old_logprobs) == len(item.rollout.token_ids) for item in pending)


def test_who_can_not_be_measured_is_inconclusive_alone(
    published: Weights, pending: list[PendingRollout], tmp_path: Path
) -> None:
    (span,) = pending[1].rollout.spans
    elsewhere = replace(pending[1].rollout, spans=(replace(span, manifest_digest="sha256:none"),))
    odd = replace(pending[2].rollout, precision="fp8")
    items = [pending[0], replace(pending[1], rollout=elsewhere), replace(pending[2], rollout=odd), pending[3]]
    found = Examiner(SETTINGS).examine(items, {published.manifest_digest: published.path, "sha256:none": tmp_path})
    assert [found[item.rollout_id].outcome for item in items] == [
        Outcome.ACCEPTED,
        Outcome.INCONCLUSIVE,
        Outcome.INCONCLUSIVE,
        Outcome.ACCEPTED,
    ]
    assert "no thresholds for fp8" in found["r2"].detail


def test_vllm_looks_again_at_each_alone(published: Weights, pending: list[PendingRollout]) -> None:
    examiner = Examiner(replace(SETTINGS, engine=VLLM))
    sizes: list[int] = []
    models = ResidentModels(lambda _: published.path, max_resident=1)
    prefill = models.activate(published.manifest_digest).prefill
    model = models.activate(published.manifest_digest)

    def counted(items):  # type: ignore[no-untyped-def]
        sizes.append(len(items))
        return prefill(items)

    model.prefill = counted  # type: ignore[method-assign]
    examiner._models = examiner._exact_models = models  # an engine is started by tests/integration/test_vllm_prefill.py
    for exact in (False, True):
        found = examiner.examine(pending, {published.manifest_digest: published.path}, exact=exact)
        assert {verdict.outcome for verdict in found.values()} == {Outcome.ACCEPTED}
    assert sizes == [4, 1, 1, 1, 1]
