"""Reading run files: what is wrong is said in one sentence that names the file."""

from pathlib import Path

import pytest

from protocol.errors import UserError
from protocol.runfile import read_run_file


def test_a_run_file_is_a_tree_of_values(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[run]\nname = "x"\n[[environments]]\nname = "a"\n')
    assert read_run_file(path) == {"run": {"name": "x"}, "environments": [{"name": "a"}]}


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="coordinator init"):
        read_run_file(tmp_path / "run.toml")


@pytest.mark.parametrize(
    ("content", "words"), [(b"run = ", "is not valid TOML"), (b"\xff\xfe", "cannot read the run file")]
)
def test_what_is_no_toml_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        read_run_file(path)
    assert str(path) in str(caught.value)


def test_what_a_file_says_replaces_what_its_recipe_says_field_by_field(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "a.toml").write_text(
        '[trainer]\nloss = "ppo"\nbetas = [0.1, 0.2]\n[scheduling]\ngroup_size = 4\n'
    )
    path = tmp_path / "run.toml"
    path.write_text('extends = "recipes/a.toml"\n[trainer]\nbetas = [0.3, 0.4]\n[run]\nname = "x"\n')
    assert read_run_file(path) == {
        "trainer": {"loss": "ppo", "betas": [0.3, 0.4]},
        "scheduling": {"group_size": 4},
        "run": {"name": "x"},
    }


@pytest.mark.parametrize(
    ("extends", "words"), [("3", "must be the path"), ('"none.toml"', "none.toml"), ('"run.toml"', "one file")]
)
def test_a_recipe_that_is_none_is_named(tmp_path: Path, extends: str, words: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"extends = {extends}\n")
    with pytest.raises(UserError, match=words):
        read_run_file(path)
