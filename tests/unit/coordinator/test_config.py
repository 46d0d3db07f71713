from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.config import load_run_file, make_run_id, model_shape
from protocol.errors import UserError
from protocol.terms import parse_terms
from tests.factories import TRAINER, make_terms, make_version

GOOD = f"""
[run]
name = "test"
trainer_key = "{TRAINER.key_id}"
[model]
name = "tiny"
path = "model"
[sampling]
eos_token_ids = [0]
[[environments]]
name = "arithmetic"
max_tokens = 8
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_defaults_are_filled_in_and_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    run_file = load_run_file(write(tmp_path, GOOD))
    assert run_file.run.database == f"sqlite+aiosqlite:///{tmp_path / 'run.db'}"
    assert run_file.model.path == tmp_path / "model"
    assert run_file.scheduling.max_staleness == 2
    assert run_file.scheduling.scheduling().batch_samples == 8 * 16
    assert run_file.verification.audit_fraction == 1.0
    assert run_file.max_tokens == 8


@pytest.mark.parametrize("url", ["sqlite+aiosqlite:////var/run.db", "postgresql+asyncpg://user@host/name"])
def test_absolute_databases_stay_as_they_are(tmp_path: Path, url: str) -> None:
    text = GOOD.replace('name = "test"', f'name = "test"\ndatabase = "{url}"')
    assert load_run_file(write(tmp_path, text)).run.database == url


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[sampling]", "[sampling]\ntop_p = 0.9", "top_p is refused"),
        ("[sampling]", "[sampling]\ntop_k = 50", "top_k is refused"),
        ("[sampling]", "[sampling]\ntemperature = 0", "sampling.temperature"),
        ("eos_token_ids = [0]", "eos_token_ids = []", "sampling.eos_token_ids"),
        ("[sampling]", "[scheduling]\nmax_stalenes = 1\n[sampling]", "scheduling.max_stalenes"),
        ("[sampling]", "[scheduling]\nmin_group = 20\n[sampling]", "min_group (20) exceeds group_size (16)"),
        ("[sampling]", '[shardcast]\nrelays = ["ftp://host"]\n[sampling]', "'ftp://host' is no relay's URL"),
        ("[sampling]", '[shardcast]\nsources = ["host:8601"]\n[sampling]', "it reads http://host:port"),
        ("[sampling]", "[scheduling]\nmax_staleness = -1\n[sampling]", "scheduling.max_staleness"),
        ("[sampling]", "[verification]\naudit_fraction = 0\n[sampling]", "verification.audit_fraction"),
        ("[sampling]", "[server]\ngrpc_port = 70000\n[sampling]", "server.grpc_port"),
        (TRAINER.key_id, "ed25519:nope", "run.trainer_key"),
        ('path = "model"', "", "model.path"),
        ("max_tokens = 8", 'max_tokens = 8\n[[environments]]\nname = "arithmetic"\nmax_tokens = 4', "the same name"),
        ("[run]", "[runn]", "run"),
        ("[run]", "[run", "not valid TOML"),
    ],
)
def test_a_mistake_names_file_field_and_value(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = write(tmp_path, GOOD.replace(old, new))
    with pytest.raises(UserError) as caught:
        load_run_file(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_absent_file_says_who_writes_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="coordinator init"):
        load_run_file(tmp_path / "run.toml")


def test_a_file_that_is_no_text_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot read"):
        load_run_file(tmp_path / "run.toml")


def test_the_models_shape_is_read_from_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 260, "hidden_size": 16}))
    assert model_shape(tmp_path) == (260, 16)


@pytest.mark.parametrize("config", [None, "{", "{}", '{"vocab_size": "many", "hidden_size": 1}'])
def test_a_folder_without_a_model_is_the_users_mistake(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(UserError, match=r"model\.path"):
        model_shape(tmp_path)


@pytest.mark.parametrize(
    ("name", "run_id"),
    [
        ("demo", "demo-0a1b2c3d"),
        ("My run, no. 2", "My-run-no-2-0a1b2c3d"),
        ("../../etc", "etc-0a1b2c3d"),
        ("数学", "run-0a1b2c3d"),
        ("x" * 64, "x" * 55 + "-0a1b2c3d"),
    ],
)
def test_a_run_id_is_one_that_manifests_and_terms_take(name: str, run_id: str) -> None:
    assert make_run_id(name, "0a1b2c3d") == run_id
    assert len(run_id) <= 64
    make_version(0, run_id=run_id)
    terms = make_terms(run_id=run_id)
    assert parse_terms(terms.to_json().encode(), "test") == terms
