"""worker.vllm_engine.context: a run may ask for longer sequences than its model has positions for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from worker.vllm_engine.context import within_context


@pytest.mark.parametrize(
    ("config", "wanted", "expected"),
    [
        ({"max_position_embeddings": 512}, 4104, 512),
        ({"max_position_embeddings": 512}, 64, 64),
        ({"max_position_embeddings": 512}, None, None),
        ({"max_position_embeddings": 512, "rope_parameters": {"rope_type": "default"}}, 4104, 512),
        ({"max_position_embeddings": 512, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 2048, 2048),
        ({"max_position_embeddings": 512, "rope_scaling": {"type": "linear", "factor": 4.0}}, 2048, 2048),
        ({}, 4104, 4104),
    ],
)
def test_no_more_than_the_model_has_positions_for(
    tmp_path: Path, config: dict[str, object], wanted: int | None, expected: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert within_context(tmp_path, wanted) == expected
