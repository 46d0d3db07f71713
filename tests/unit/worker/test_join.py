from __future__ import annotations

import pytest

from protocol.errors import UserError
from tests.factories import make_terms
from worker.config import WorkerConfig
from worker.join import reference_engine, require_admitted


def test_a_precision_that_the_run_does_not_admit_ends_before_anything_is_fetched() -> None:
    terms = make_terms(precision_classes=("bf16", "kv-fp8"))
    require_admitted("kv-fp8", terms, "http://run")
    with pytest.raises(
        UserError, match=r"http://run admits precision bf16, kv-fp8, not fp8: join with --precision bf16"
    ):
        require_admitted("fp8", terms, "http://run")


def test_the_reference_engine_has_one_precision() -> None:
    assert reference_engine(WorkerConfig(dtype="bfloat16"), make_terms()).build.startswith("transformers ")
    with pytest.raises(UserError, match="use --engine vllm"):
        reference_engine(WorkerConfig(precision="fp8"), make_terms())
