"""The run file as a tree of values. Each role checks the sections that it reads."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from protocol.errors import UserError


def read_run_file(path: Path) -> dict[str, Any]:
    """Parse a run file (TOML) over the recipe that it `extends`, if any. Raises UserError that names the file."""
    values = _read(path)
    recipe = values.pop("extends", None)
    if recipe is None:
        return values
    if not isinstance(recipe, str):
        raise UserError(f"{path}: extends must be the path of a recipe, relative to this file, got {recipe!r}")
    base = _read(path.parent / recipe)
    if "extends" in base:
        raise UserError(f"{path}: {recipe} extends another file itself; a recipe is one file")
    return _over(base, values)


def _over(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Tables are merged, anything else of `values` replaces what `base` has."""
    merged = dict(base)
    for key, value in values.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _over(base[key], value) if both else value
    return merged


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"there is no run file {path}: `coordinator init` writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the run file {path}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error
