"""Thresholds: what a run file may say, and which class a chunk belongs to."""

import copy
from pathlib import Path

import pytest

from coordinator.calibration.report import to_toml
from coordinator.config import VerificationSection
from coordinator.verification.thresholds import Thresholds, thresholds_of
from protocol.errors import UserError
from tests.thresholds import BY_HAND


def test_the_class_of_a_chunk_is_the_largest_that_it_reaches() -> None:
    assert [BY_HAND.for_chunk(tokens).tokens_min for tokens in (1, 4, 5, 15, 16, 31, 32)] == [1, 1, 5, 5, 16, 16, 32]


def test_longer_rollouts_are_held_to_tighter_averages() -> None:
    assert BY_HAND.logprob_median_allowed(1) > BY_HAND.logprob_median_allowed(5) > BY_HAND.logprob_median_allowed(64)
    per_token = [BY_HAND.seed_sum_allowed(tokens) / tokens for tokens in (1, 5, 64)]
    assert per_token == sorted(per_token, reverse=True)


def test_survives_a_mapping_and_a_file(tmp_path: Path) -> None:
    assert Thresholds.from_mapping(BY_HAND.to_mapping()) == BY_HAND
    fields = copy.deepcopy(BY_HAND.to_mapping())
    chunks, pooled = fields.pop("chunks"), fields.pop("pooled")
    tests = pooled.pop("tests")
    lines = [f"{name} = {list(value) if isinstance(value, tuple) else value!r}" for name, value in fields.items()]
    for chunk in chunks:
        lines += ["[[chunks]]", *(f"{name} = {value}" for name, value in chunk.items())]
    lines += ["[pooled]", *(f"{name} = {value!r}" for name, value in pooled.items())]
    for test in tests:
        classes = test.pop("classes")
        lines += ["[[pooled.tests]]", *(f"{name} = {value!r}" for name, value in test.items())]
        for each in classes:
            lines += ["[[pooled.tests.classes]]", *(f"{name} = {value}" for name, value in each.items())]
    file = tmp_path / "thresholds.toml"
    file.write_text("\n".join(lines))
    assert Thresholds.from_toml(file) == BY_HAND


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("seed_margin_max",), None, "seed_margin_max is missing"),
        (("seed_margin_max",), "0.5", "seed_margin_max must be a number"),
        (("seed_margin_max",), float("nan"), "seed_margin_max must be finite"),
        (("logprob_gap_max",), -1.0, "logprob_gap_max must be finite and not negative"),
        (("margin",), 1.0, "margin is not a field"),
        (("source",), 3, "source must be text"),
        (("chunks",), [], "tokens_min must ascend from 1"),
        (("chunks",), 3, "chunks must be a list"),
        (("chunks", 1, "tokens_min"), 1, "tokens_min must ascend from 1"),
        (("chunks", 0, "sign_mismatches_max"), 1.5, r"chunks\[0\]: sign_mismatches_max must be a whole number"),
        (("chunks", 0, "sign_mismatches_max"), True, r"chunks\[0\]: sign_mismatches_max must be a whole number"),
    ],
)
def test_names_the_field_that_is_wrong(path: tuple[object, ...], value: object, message: str) -> None:
    fields = copy.deepcopy(BY_HAND.to_mapping())
    fields["chunks"] = list(fields["chunks"])
    inner = fields
    for step in path[:-1]:
        inner = inner[step]  # type: ignore[index]
    if value is None:
        del inner[path[-1]]  # type: ignore[arg-type]
    else:
        inner[path[-1]] = value  # type: ignore[index]
    with pytest.raises(UserError, match=message):
        Thresholds.from_mapping(fields)


def test_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "thresholds.toml"
    with pytest.raises(UserError, match=r"thresholds\.toml"):
        Thresholds.from_toml(file)
    file.write_text("chunks = [")
    with pytest.raises(UserError, match=r"thresholds\.toml"):
        Thresholds.from_toml(file)


def test_a_run_takes_its_thresholds_from_the_file_or_in_place(tmp_path: Path) -> None:
    file = tmp_path / "thresholds.toml"
    file.write_text(to_toml(BY_HAND))
    assert thresholds_of(VerificationSection(thresholds_file=file)) == BY_HAND
    assert thresholds_of(VerificationSection(thresholds=BY_HAND.to_mapping())) == BY_HAND
    with pytest.raises(ValueError, match="keep one"):
        VerificationSection(thresholds=BY_HAND.to_mapping(), thresholds_file=file)


def test_a_run_without_thresholds_is_told_to_calibrate() -> None:
    with pytest.raises(UserError, match="names no thresholds: `coordinator calibrate"):
        thresholds_of(VerificationSection())
    with pytest.raises(UserError, match=r"no thresholds in /nowhere/t\.toml yet: `coordinator calibrate"):
        thresholds_of(VerificationSection(thresholds_file=Path("/nowhere/t.toml")))
