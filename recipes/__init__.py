"""Choices of objective and schedule: `coordinator init --recipe` writes one into a run file, or a run file extends it."""

from __future__ import annotations

from importlib import resources

from protocol.errors import UserError


def recipe_text(name: str) -> str:
    """The TOML of a recipe. Raises UserError for one that there is not."""
    texts = {
        path.name.removesuffix(".toml"): path.read_text()
        for path in resources.files(__name__).iterdir()
        if path.name.endswith(".toml")
    }
    if name not in texts:
        raise UserError(f"there is no recipe {name!r}: choose one of {', '.join(sorted(texts))}")
    return texts[name]
