"""Dataclasses of numbers from parsed TOML or JSON: all fields there, none else, each of the right kind."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from protocol.errors import UserError


def checked(
    fields: Any, cls: type, where: str, *, optional: frozenset[str] = frozenset(), signed: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """The values of a dataclass's fields. `signed`: those that may be negative. Raises UserError that names the field."""
    if not isinstance(fields, Mapping):
        raise UserError(f"{where} must be a table (got {fields!r:.40})")
    types = {field.name: str(field.type) for field in dataclasses.fields(cls)}
    if missing := sorted(types.keys() - fields.keys() - optional):
        raise UserError(f"{where}: {missing[0]} is missing")
    if unknown := sorted(fields.keys() - types.keys()):
        raise UserError(f"{where}: {unknown[0]} is not a field; known are {', '.join(types)}")
    return {
        name: _number(fields[name], kind, f"{where}: {name}", name in signed)
        for name, kind in types.items()
        if name in fields
    }


def tables(value: Any, where: str) -> list[Any]:
    """A list of tables. Raises UserError if it is anything else."""
    if not isinstance(value, list | tuple) or not all(isinstance(each, Mapping) for each in value):
        raise UserError(f"{where} must be a list of tables")
    return list(value)


def texts(value: Any, where: str) -> tuple[str, ...]:
    """A list of texts. Raises UserError if it is anything else."""
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise UserError(f"{where} must be a list of texts")
    return tuple(value)


def _number(value: Any, kind: str, where: str, signed: bool) -> Any:
    if kind not in ("int", "float", "str"):
        return value
    if kind == "str":
        if not isinstance(value, str):
            raise UserError(f"{where} must be text (got {value!r:.40})")
        return value
    if isinstance(value, bool) or not isinstance(value, int if kind == "int" else int | float):
        raise UserError(f"{where} must be {'a whole number' if kind == 'int' else 'a number'} (got {value!r:.40})")
    if not math.isfinite(value) or (value < 0 and not signed):
        raise UserError(f"{where} must be finite{'' if signed else ' and not negative'} (got {value!r:.40})")
    return value if kind == "int" else float(value)
