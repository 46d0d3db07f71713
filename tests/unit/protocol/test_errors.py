from __future__ import annotations

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
