"""What may be loaded, and in whose place, is decided from files alone."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.errors import OurFault
from tests.tiny_model import build_other_tiny_model, build_tiny_model
from worker.vllm_engine.reload import require_loadable, require_replaceable


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build_tiny_model(tmp_path / "model")


def rewrite(folder: Path, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def test_a_published_version_is_loadable_and_replaces_another(model: Path, tmp_path: Path) -> None:
    other = build_other_tiny_model(tmp_path / "other")
    assert require_loadable(model)["lm_head.weight"] == ("BF16", (260, 128))
    require_replaceable(require_loadable(model), require_loadable(other))


def test_a_checkpoint_without_an_explicit_head_is_refused(model: Path) -> None:
    rewrite(model, lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(OurFault, match="lm_head"):
        require_loadable(model)


def test_other_shapes_and_names_are_refused(model: Path, tmp_path: Path) -> None:
    current = require_loadable(model)
    other = build_tiny_model(tmp_path / "other")
    rewrite(other, lambda weights: weights.update({"model.norm.weight": torch.ones(64)}))
    with pytest.raises(OurFault, match=r"model\.norm\.weight"):
        require_replaceable(current, require_loadable(other))
    rewrite(other, lambda weights: weights.pop("model.norm.weight"))
    with pytest.raises(OurFault, match="missing"):
        require_replaceable(current, require_loadable(other))


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 8, b"\x05" + b"\0" * 7 + b"nojsn", b"\x02" + b"\0" * 7 + b"[]", b"\xff" * 9]
)
def test_unreadable_files_are_named(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(OurFault, match=r"model\.safetensors"):
        require_loadable(model)


def test_a_truncated_file_is_named(model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[:-1])
    with pytest.raises(OurFault, match="bytes"):
        require_loadable(model)


def test_a_folder_without_weights_or_config_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(OurFault, match=r"config\.json"):
        require_loadable(tmp_path)
    (model / "model.safetensors").unlink()
    with pytest.raises(OurFault, match="safetensors"):
        require_loadable(model)
