from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.errors import UserError
from tests.factories import make_terms
from tests.turns import make_sums
from worker.config import WorkerConfig
from worker.join import reference_engine, require_admitted, require_tools


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


def test_a_tool_that_is_not_here_ends_before_anything_is_fetched() -> None:
    """What a run names by a path is not imported: it is a name like any other."""
    rules = replace(make_sums().rules, tool="os:system")
    with pytest.raises(UserError, match="http://run call a tool that this worker doesn't have"):
        require_tools(make_terms(turns=(rules,)), "http://run")
    require_tools(make_terms(), "http://run")
