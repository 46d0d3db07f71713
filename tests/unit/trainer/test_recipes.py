"""Every recipe makes a run that coordinator and trainer accept."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.config import load_run_file
from coordinator.init import init_run
from tests.tiny_model import build_tiny_model
from trainer.config import load_trainer_run
from trainer.losses import make_objective

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.toml"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    build_tiny_model(folder / "model")
    init_run(folder / "run", name="run", model=folder / "model", relays=())
    return folder / "run"


def test_there_are_some() -> None:
    assert {path.stem for path in RECIPES} == {"dapo", "intellect2", "ipo", "sao"}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_makes_a_run_that_is_accepted(folder: Path, recipe: Path) -> None:
    lines = (folder / "run.toml").read_text().splitlines()
    own = {"loss", "groups_per_batch", "group_size", "min_group", "max_staleness", "learning_rate", "advantage"}
    kept = [line for line in lines if line.split(" ")[0] not in own]
    path = folder / f"{recipe.stem}.toml"
    path.write_text(f'extends = "{recipe}"\n' + "\n".join(kept))
    config = load_trainer_run(path).trainer
    objective = make_objective(config.loss, config.loss_params, config.modifiers, config.regularizers)
    assert type(objective.loss).__module__.endswith(config.loss)
    assert load_run_file(path).scheduling.group_size == (1 if recipe.stem == "sao" else 16)
