"""Objectives by name. Each is one file with its formula and source; what they share is in `base`."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, get_type_hints

from protocol.errors import UserError
from trainer.losses.async_ppo import AsyncPpo
from trainer.losses.base import Aggregation, Loss, LossInputs, LossOutput, clamp_behaviour
from trainer.losses.ipo import Ipo
from trainer.losses.pg_is import PgIs
from trainer.losses.ppo import Ppo

__all__ = ["LOSSES", "Aggregation", "Loss", "LossInputs", "LossOutput", "clamp_behaviour", "make_loss"]

LOSSES: dict[str, type[Loss]] = {"async_ppo": AsyncPpo, "ipo": Ipo, "pg_is": PgIs, "ppo": Ppo}


def make_loss(name: str, **params: Any) -> Loss:
    """The objective `name`, or a researcher's own by import path (`package.module:Class`, a dataclass on `Loss`).

    Raises UserError that names the choices if the name or a parameter is unknown or of the wrong type.
    """
    cls = LOSSES.get(name) or _own_loss(name)
    known = [field.name for field in dataclasses.fields(cls)]
    unknown = sorted(set(params) - set(known))
    if unknown:
        raise UserError(f"the loss {name!r} has no parameter {', '.join(unknown)}; it takes {', '.join(known)}")
    hints = get_type_hints(cls)
    for key, value in params.items():
        kinds = (int, float) if hints[key] is float else hints[key]
        if not isinstance(value, kinds) or isinstance(value, bool) != (hints[key] is bool):
            raise UserError(f"the loss {name!r}: {key} must be of type {hints[key].__name__}, got {value!r}")
    return cls(**params)


def _own_loss(name: str) -> type[Loss]:
    if ":" not in name:
        raise UserError(f"there is no loss {name!r}; choose {', '.join(sorted(LOSSES))}, or give package.module:Class")
    module_name, _, class_name = name.partition(":")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"cannot load the loss {name!r}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Loss)):
        raise UserError(f"the loss {name!r} must derive from trainer.losses.base.Loss")
    return cls
