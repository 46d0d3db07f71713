"""Every recipe makes a run that coordinator and trainer accept, over the file that `init` writes or within it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coordinator.config import load_run_file
from coordinator.init import init_run
from protocol.errors import UserError
from tests.tiny_model import build_tiny_model
from trainer.config import TrainerConfig, load_trainer_run
from trainer.losses import make_objective

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.toml"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    build_tiny_model(folder / "model")
    init_run(folder / "run", name="run", model=folder / "model", relays=())
    return folder


def test_there_are_some() -> None:
    assert {path.stem for path in RECIPES} == {"dapo", "intellect2", "ipo", "sao"}


@pytest.mark.parametrize("way", ["extends", "init"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_makes_a_run_that_is_accepted(folder: Path, recipe: Path, way: str) -> None:
    """One line above the file as `init` wrote it, or `init --recipe`: the recipe's fields hold either way."""
    if way == "extends":
        path = folder / "run" / f"{recipe.stem}.toml"
        path.write_text(f'extends = "{recipe}"\n' + (folder / "run" / "run.toml").read_text())
    else:
        path = init_run(folder / recipe.stem, name="run", model=folder / "model", relays=(), recipe=recipe.stem)
        assert recipe.read_text().splitlines()[0] in path.read_text()
    config = load_trainer_run(path).trainer
    objective = make_objective(config.loss, config.loss_params, config.modifiers, config.regularizers)
    assert type(objective.loss).__module__.endswith(config.loss)
    scheduling = load_run_file(path).scheduling
    rate, staleness, sizes = {
        "dapo": (1e-6, 1, (16, 2)),
        "intellect2": (3e-7, 4, (16, 2)),
        "ipo": (1e-6, 2, (16, 2)),
        "sao": (1e-6, 4, (1, 1)),
    }[recipe.stem]
    assert (config.learning_rate, scheduling.max_staleness) == (rate, staleness)
    assert (scheduling.group_size, scheduling.min_group) == sizes
    assert config.versions == 100  # what is no matter of a recipe stays


def test_what_is_commented_out_are_the_defaults(folder: Path) -> None:
    path = folder / "run" / "run.toml"
    text, count = re.subn(r"^# (?=[a-z_]+ = )", "", path.read_text(), flags=re.MULTILINE)
    assert count >= 6
    explicit = folder / "run" / "explicit.toml"
    explicit.write_text(text)
    assert load_run_file(explicit).scheduling == load_run_file(path).scheduling
    assert load_trainer_run(explicit).trainer == load_trainer_run(path).trainer


def test_ipo_is_what_a_run_does_anyway(folder: Path) -> None:
    plain = folder / "run" / "run.toml"
    path = folder / "run" / "same.toml"
    path.write_text(f'extends = "{RECIPES[0].parent / "ipo.toml"}"\n' + plain.read_text())
    assert load_run_file(path).scheduling == load_run_file(plain).scheduling
    config = load_trainer_run(path).trainer
    assert config.model_copy(update={"loss_params": {}}) == load_trainer_run(plain).trainer
    default = TrainerConfig()
    objective = make_objective(config.loss, config.loss_params, (), ())
    assert objective.loss == make_objective(default.loss, default.loss_params, (), ()).loss


def test_a_recipe_that_there_is_not_makes_nothing(folder: Path) -> None:
    with pytest.raises(UserError, match="choose one of dapo, intellect2, ipo, sao"):
        init_run(folder / "none", name="run", model=folder / "model", relays=(), recipe="../ipo")
    assert not (folder / "none").exists()
