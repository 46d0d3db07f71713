from __future__ import annotations

from typing import Any

import pytest

from protocol.errors import (
    BadSignature,
    EnvironmentFault,
    OurFault,
    RollswarmError,
    SourceFault,
    UserError,
    WorkerFault,
    explain_validation,
)


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (UserError("x"), "user"),
        (WorkerFault("form", "x"), "worker"),
        (BadSignature("x"), "worker"),
        (SourceFault("x"), "source"),
        (EnvironmentFault("x"), "environment"),
        (OurFault("x"), "us"),
    ],
)
def test_every_error_names_whose_fault_it_is(error: RollswarmError, fault: str) -> None:
    assert isinstance(error, RollswarmError)
    assert error.fault == fault


def test_a_worker_fault_carries_reason_and_detail() -> None:
    fault = WorkerFault("lease", "the lease is expired")
    assert (fault.reason, fault.detail, str(fault)) == ("lease", "the lease is expired", "lease: the lease is expired")


def test_a_bad_signature_has_its_own_reason() -> None:
    assert BadSignature("who?").reason == "signature"


def test_validation_names_source_field_problem_and_value() -> None:
    errors = [
        {"loc": ("scheduling", "max_staleness"), "msg": "too small", "input": -1},
        {"loc": ("run", "name"), "msg": "Field required", "type": "missing", "input": {}},
        {"loc": (), "msg": "bad", "input": "x" * 500},
    ]
    text = explain_validation(errors, "run.toml")
    assert text.startswith("run.toml: scheduling.max_staleness: too small (got -1); run.name: Field required; ")
    assert "(whole file): bad" in text
    assert len(text) < 250, "a value is cut to what a person can read"


def test_validation_says_nothing_that_follows_from_the_rest() -> None:
    errors: list[dict[str, Any]] = [
        {"loc": ("environments", 0, "max_tokens"), "msg": "Value error, no number", "input": "x"},
        {"loc": ("environments",), "msg": "too few", "type": "too_short", "input": [{}]},
        {"loc": ("eos",), "msg": "too few", "type": "too_short", "input": []},
    ]
    said = "environments.0.max_tokens: no number (got 'x'); eos: too few (got [])"
    assert explain_validation(errors, "run.toml") == f"run.toml: {said}"
