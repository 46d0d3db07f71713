"""The command line of `trainer evaluate`: what its options become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import trainer.evaluation as evaluation
import trainer.main as module
from trainer.evaluation import Plan


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Those that were to be evaluated."""
    made: list[Plan] = []

    async def run_evaluation(config: Path, plan: Plan, out: Path, sampler: object) -> dict[str, Any]:
        made.append(plan)
        return {"environments": {}}

    monkeypatch.setattr(evaluation, "run_evaluation", run_evaluation)
    monkeypatch.setattr(module, "set_up_logging", lambda: None)
    return made


@pytest.mark.parametrize(
    ("options", "ks", "temperature"),
    [
        (["-k", "1", "-k", "8"], (1, 8), 0.7),
        (["--k", "8"], (8,), 0.7),
        (["--temperature", "0"], (1, 8), 0.0),
    ],
)
def test_options(
    tmp_path: Path, plans: list[Plan], options: list[str], ks: tuple[int, ...], temperature: float
) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[sampling]\ntemperature = 0.7\n")
    common = ["evaluate", "-c", str(config), "--model", "model", "--samples", "8"]
    done = CliRunner().invoke(module.app, [*common, *options])
    assert done.exit_code == 0, done.output
    assert [(plan.ks, plan.temperature) for plan in plans] == [(ks, temperature)]
