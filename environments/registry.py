"""Environments by name, or by import path for a researcher's own (`my_package.module:MyEnvironment`)."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any, cast, get_type_hints

from environments.base import Environment
from protocol.errors import UserError

# Imported only when asked for: some need libraries that a run without them need not have.
BUILT_IN = {
    "arithmetic": "environments.arithmetic:Arithmetic",
    "calculator": "environments.calculator:Calculator",
    "code": "environments.code:Code",
    "counting": "environments.counting:Counting",
    "dataset": "environments.dataset:Dataset",
    "math": "environments.math:Math",
    "reasoning_gym": "environments.reasoning_gym:ReasoningGym",
    "verifiers": "environments.verifiers_adapter:Verifiers",
}


def make_environment(name: str, params: Mapping[str, Any] | None = None) -> Environment:
    """The environment `name` with `params`. Raises UserError naming the choices if either is unknown or ill-typed."""
    cls = _environment_class(name)
    given = dict(params or {})
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unknown = sorted(set(given) - set(fields))
    if unknown:
        raise UserError(
            f"environment {name!r} has no parameter {', '.join(unknown)}; it takes {', '.join(fields) or 'none'}"
        )
    hints = get_type_hints(cls)
    for key, value in given.items():
        _check_type(f"environment {name!r}: {key}", value, hints[key])
    return cast(Environment, cls(**given))


def _environment_class(name: str) -> Any:
    path = BUILT_IN.get(name, name if ":" in name else "")
    if not path:
        raise UserError(
            f"there is no environment {name!r}; choose {', '.join(sorted(BUILT_IN))}, or give package.module:Class"
        )
    module_name, _, class_name = path.partition(":")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"cannot load the environment {name!r}: {error}") from error
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise UserError(
            f"the environment {name!r} must be a dataclass with the methods of environments.base.Environment"
        )
    return cls


def _check_type(what: str, value: Any, hint: Any) -> None:
    expected = getattr(hint, "__origin__", hint)
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return
    if isinstance(expected, type) and (not isinstance(value, expected) or (expected is int and value is True)):
        raise UserError(f"{what} must be of type {expected.__name__}, got {value!r}")
