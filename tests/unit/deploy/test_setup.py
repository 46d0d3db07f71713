"""What `setup.py` writes: the run file's fields, passwords once, and an .env for compose."""

from __future__ import annotations

import argparse
import stat
import tomllib
from pathlib import Path

import yaml

from deploy.setup import environment, init_command, settings, unreadable, with_settings, write_secrets
from trainer.config import TrainerConfig

ROOT = Path(__file__).parents[3]

_RUN_FILE = """\
# A run
[run]
name = "one"
database = "sqlite+aiosqlite:///run.db"        # or another

[[environments]]
name = "arithmetic"

[server]
host = "127.0.0.1"

[trainer]
loss = "ipo"
"""


def test_fields_are_replaced_or_added_in_their_section_and_nothing_else_changes() -> None:
    text = with_settings(_RUN_FILE, settings("cuda"))
    values = tomllib.loads(text)
    assert values["run"] == {"name": "one", "database": "postgresql+asyncpg://rollswarm@postgres:5432/rollswarm"}
    assert values["server"]["host"] == "0.0.0.0"
    assert values["trainer"]["device"] == "cuda" and values["trainer"]["loss"] == "ipo"
    assert values["shardcast"] == {"sources": ["http://origin:8600"]}  # a section that was not there
    assert values["environments"] == [{"name": "arithmetic"}]
    assert text.startswith("# A run\n")


def test_to_set_fields_twice_is_to_set_them_once() -> None:
    once = with_settings(_RUN_FILE, settings("cpu"))
    assert with_settings(once, settings("cpu")) == once


def test_what_the_trainer_writes_is_in_its_volumes() -> None:
    """Its root is read-only, and relative paths are relative to the run file."""
    trainer = yaml.safe_load((ROOT / "deploy/docker-compose.yml").read_text())["services"]["trainer"]
    volumes = tuple(mount.split(":")[1] for mount in trainer["volumes"] if not mount.endswith(":ro"))
    text = with_settings(_RUN_FILE, settings("cpu"))
    written = {**TrainerConfig().model_dump(), **tomllib.loads(text)["trainer"]}
    for name in ("origin_data", "checkpoints", "evaluations", "tensorboard"):
        assert str(written[name]).startswith(volumes), name


def test_a_recipe_is_passed_on_to_init(tmp_path: Path) -> None:
    options = argparse.Namespace(
        coordinator="coordinator", model=tmp_path, name="run", host="h", relay=None, recipe="sao"
    )
    assert init_command(options, tmp_path)[-2:] == ["--recipe", "sao"]


def test_passwords_are_made_once_and_nobody_else_enters_their_folder(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    write_secrets(folder)
    first = (folder / "postgres_password").read_text()
    write_secrets(folder)
    assert len(first) >= 32
    assert (folder / "postgres_password").read_text() == first
    assert (folder / "pgpass").read_text() == f"*:*:rollswarm:rollswarm:{first}\n"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "pgpass").stat().st_mode) == 0o600


def test_the_device_chooses_the_profile() -> None:
    assert environment(Path("/m"), "ed25519:00", "cuda").splitlines()[0] == "COMPOSE_PROFILES=gpu"
    assert environment(Path("/m"), "ed25519:00", "cpu").splitlines()[1:] == ["MODEL_DIR=/m", "TRAINER_KEY=ed25519:00"]


def test_a_model_that_the_containers_user_cannot_read_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "config.json").write_text("{}")
    assert unreadable(tmp_path) is None
    weights = tmp_path / "model.safetensors"
    weights.touch(mode=0o600)
    assert unreadable(tmp_path) == weights
