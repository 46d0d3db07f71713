"""Objectives by name. Each is one file with its formula and source; what they share is in `inputs` and `base`."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from protocol.errors import UserError
from trainer.losses.a3po import A3po
from trainer.losses.async_ppo import AsyncPpo
from trainer.losses.base import Aggregation, Loss, LossOutput, Modifier, Objective, Regularizer
from trainer.losses.cispo import Cispo
from trainer.losses.decoupled import DecoupledPpo
from trainer.losses.dppo import Dppo
from trainer.losses.entropy_bonus import EntropyBonus
from trainer.losses.gspo import Gspo
from trainer.losses.icepop import IcePop
from trainer.losses.inputs import Alternatives, LossInputs, Need, clamp_behaviour
from trainer.losses.ipo import Ipo
from trainer.losses.klpo import Klpo
from trainer.losses.m2po import M2po
from trainer.losses.opd import Opd
from trainer.losses.pg_is import PgIs
from trainer.losses.ppo import Ppo
from trainer.losses.ppo_ewma import PpoEwma
from trainer.losses.reference_kl import ReferenceKl
from trainer.losses.sao import Sao
from trainer.losses.sat import Sat
from trainer.losses.seq_drop import SeqDrop
from trainer.losses.soft_staleness import SoftStaleness
from trainer.losses.tis import Tis
from trainer.losses.two_sided import TwoSided
from trainer.losses.vcpo import Vcpo
from trainer.losses.vtrace import Vtrace

__all__ = [
    "LOSSES",
    "MODIFIERS",
    "REGULARIZERS",
    "Aggregation",
    "Alternatives",
    "Loss",
    "LossInputs",
    "LossOutput",
    "Modifier",
    "Need",
    "Objective",
    "Regularizer",
    "clamp_behaviour",
    "make_loss",
    "make_objective",
]

LOSSES: dict[str, type[Loss]] = {
    "a3po": A3po,
    "async_ppo": AsyncPpo,
    "cispo": Cispo,
    "decoupled_ppo": DecoupledPpo,
    "dppo": Dppo,
    "gspo": Gspo,
    "icepop": IcePop,
    "ipo": Ipo,
    "klpo": Klpo,
    "m2po": M2po,
    "opd": Opd,
    "pg_is": PgIs,
    "ppo": Ppo,
    "ppo_ewma": PpoEwma,
    "sao": Sao,
    "sat": Sat,
    "tis": Tis,
    "two_sided": TwoSided,
    "vtrace": Vtrace,
}
MODIFIERS: dict[str, type[Modifier]] = {"seq_drop": SeqDrop, "soft_staleness": SoftStaleness, "vcpo": Vcpo}
REGULARIZERS: dict[str, type[Regularizer]] = {"entropy": EntropyBonus, "reference_kl": ReferenceKl}

Part = TypeVar("Part", Loss, Modifier, Regularizer)


def make_loss(name: str, **params: Any) -> Loss:
    """The loss `name`, or a researcher's own by import path (`package.module:Class`, a dataclass on `Loss`).

    Raises UserError that names the choices if the name or a parameter is unknown or of the wrong type.
    """
    return _make("loss", LOSSES, Loss, name, params)  # type: ignore[type-abstract]


def make_objective(
    name: str,
    params: Mapping[str, Any] | None = None,
    modifiers: Sequence[Mapping[str, Any]] = (),
    regularizers: Sequence[Mapping[str, Any]] = (),
) -> Objective:
    """The loss `name` with `params`, and tables of `name` and parameters for what goes around and beside it.

    Raises UserError as `make_loss` does.
    """
    return Objective(
        make_loss(name, **(params or {})),
        tuple(_make("modifier", MODIFIERS, Modifier, *_named("modifier", entry)) for entry in modifiers),
        tuple(
            _make("regularizer", REGULARIZERS, Regularizer, *_named("regularizer", entry))  # type: ignore[type-abstract]
            for entry in regularizers
        ),
    )


def _named(kind: str, entry: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    name = entry.get("name")
    if not isinstance(name, str):
        raise UserError(f"each {kind} is a table with a name and its parameters, got {dict(entry)!r}")
    return name, {key: value for key, value in entry.items() if key != "name"}


def _make(kind: str, known: Mapping[str, type[Part]], base: type[Part], name: str, params: Mapping[str, Any]) -> Part:
    cls = known.get(name) or _own(kind, known, base, name)
    hints = get_type_hints(cls)
    fields = [field.name for field in dataclasses.fields(cls)]
    unknown = sorted(set(params) - set(fields))
    if unknown:
        takes = ", ".join(fields) or "none"
        raise UserError(f"the {kind} {name!r} has no parameter {', '.join(unknown)}; it takes {takes}")
    fitting = {key: _fitting(f"the {kind} {name!r}: {key}", hints[key], value) for key, value in params.items()}
    try:
        return cls(**fitting)
    except UserError:
        raise
    except (TypeError, ValueError) as error:  # a field left out, a method that is missing, its own check
        raise UserError(f"the {kind} {name!r} can't be made: {error}") from error


def _fitting(what: str, hint: Any, value: Any) -> Any:
    """The value as a field of that type takes it: plain types exactly, others (tuples, choices, …) as pydantic reads them."""
    if hint in (bool, int, float, str):
        kinds = (int, float) if hint is float else hint
        if not isinstance(value, kinds) or isinstance(value, bool) != (hint is bool):
            raise UserError(f"{what} must be of type {hint.__name__}, got {value!r}")
        return value
    try:
        return TypeAdapter(hint).validate_python(value)
    except (ValidationError, PydanticUserError) as error:
        raise UserError(f"{what} must be of type {hint}, got {value!r} ({error})") from error


def _own(kind: str, known: Mapping[str, type[Part]], base: type[Part], name: str) -> type[Part]:
    if ":" not in name:
        raise UserError(f"there is no {kind} {name!r}; choose {', '.join(sorted(known))}, or give package.module:Class")
    module_name, _, class_name = name.partition(":")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # whatever somebody's own module does as it is imported
        raise UserError(f"cannot load the {kind} {name!r}: {type(error).__name__}: {error}") from error
    derives = isinstance(cls, type) and issubclass(cls, base)
    if not derives or "__dataclass_fields__" not in vars(cls):  # inherited fields are not its own
        raise UserError(
            f"the {kind} {name!r} must be a class with @dataclass of its own that derives from trainer.losses.{base.__name__}"
        )
    return cls
