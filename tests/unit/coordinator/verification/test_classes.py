"""Each precision class has its own thresholds, and a rollout is judged by those of its class alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.calibration.report import to_toml
from coordinator.config import VerificationSection
from coordinator.verification.checks import run_checks
from coordinator.verification.classes import classes_of
from coordinator.verification.examination import ExaminerSettings
from coordinator.verification.resident import ResidentModels, prefill_rollouts
from coordinator.verification.thresholds import Thresholds
from protocol.errors import OurFault, UserError
from protocol.rollout import Outcome, RejectionReason
from tests.adversary.attacks.registry import Attack, make_cheat
from tests.adversary.batch import write_all
from tests.thresholds import BY_HAND
from tests.tiny_model import build_tiny_model
from tests.unit.coordinator.verification.claims import make_claim, make_request, to_prefill
from tests.unit.coordinator.verification.test_judge import make_pending
from worker.engine import Weights

WIDE = replace(
    BY_HAND,
    chunks=tuple(
        replace(
            chunk, exponent_mismatches_max=128, sign_mismatches_max=128, mantissa_mean_max=64, mantissa_median_max=64
        )
        for chunk in BY_HAND.chunks
    ),
    logprob_gap_median_max=1.0,
    logprob_gap_max=5.0,
    seed_margin_max=5.0,
    seed_margin_mean_max=1.0,
)


def write(folder: Path, name: str, thresholds: Thresholds) -> Path:
    file = folder / f"{name}.toml"
    file.write_text(to_toml(thresholds))
    return file


def test_the_classes_with_thresholds_are_admitted_bf16_first(tmp_path: Path) -> None:
    bf16, fp8 = (
        write(tmp_path, "bf16", BY_HAND),
        write(tmp_path, "fp8", replace(WIDE, hardware=("NVIDIA L4, vllm 1",))),
    )
    found = classes_of(VerificationSection(thresholds_file=bf16, classes={"fp8": fp8}))
    assert list(found) == ["bf16", "fp8"]
    assert found["bf16"] == BY_HAND and found["fp8"].hardware == ("NVIDIA L4, vllm 1",)
    assert list(classes_of(VerificationSection(classes={"kv-fp8": fp8}))) == ["kv-fp8"], "a run need not admit bf16"


def test_a_class_without_thresholds_is_no_class(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"fp8: there are no thresholds in .*: `coordinator calibrate --precision fp8"):
        classes_of(VerificationSection(classes={"fp8": tmp_path / "none.toml"}))
    with pytest.raises(UserError, match="names no thresholds"):
        classes_of(VerificationSection())
    with pytest.raises(ValueError, match=r"classes\.int9 is no precision class"):
        VerificationSection(classes={"int9": tmp_path})
    with pytest.raises(ValueError, match="keep one"):
        VerificationSection(thresholds_file=tmp_path, classes={"bf16": tmp_path})


def test_an_undeclared_class_shows_as_a_cheat_and_a_declared_one_passes_by_its_own(tmp_path: Path) -> None:
    published = Weights(0, "sha256:" + "0" * 64, build_tiny_model(tmp_path / "model"))
    requests = [make_request(number, max_tokens=24) for number in range(8)]
    coarse = write_all(make_cheat(Attack.INT4), requests, published, tmp_path)
    models = ResidentModels(lambda _: published.path, max_resident=1)
    claims = [make_claim(*pair) for pair in zip(coarse, requests, strict=True)]
    measured = prefill_rollouts([to_prefill(claim, n) for n, claim in enumerate(claims)], models)
    undeclared = [run_checks(claim, measured[n], BY_HAND) for n, claim in enumerate(claims)]
    declared = [run_checks(claim, measured[n], WIDE) for n, claim in enumerate(claims)]
    assert {verdict.reason for verdict in undeclared} <= {
        RejectionReason.PROOF,
        RejectionReason.LOGPROB,
        RejectionReason.SEED,
    }
    assert {verdict.outcome for verdict in declared} == {Outcome.ACCEPTED}


def test_a_rollout_is_held_to_its_own_class() -> None:
    settings = ExaminerSettings(1.0, (0,), 260, 16, {"bf16": BY_HAND, "fp8": WIDE})
    item = make_pending(0, (0,))
    assert settings.thresholds(item) is BY_HAND
    assert settings.thresholds(replace(item, rollout=replace(item.rollout, precision="fp8"))) is WIDE
    with pytest.raises(OurFault, match="no thresholds for kv-fp8 any more"):
        settings.thresholds(replace(item, rollout=replace(item.rollout, precision="kv-fp8")))
