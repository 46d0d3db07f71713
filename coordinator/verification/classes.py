"""The precision classes that a run admits, each with its own thresholds: a rollout is judged by those of its class alone.

A class that is not declared shows as what it is, a cheat, since bf16's thresholds are not made for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.verification.thresholds import Thresholds, thresholds_of
from protocol.declaration import BF16
from protocol.errors import UserError

if TYPE_CHECKING:
    from coordinator.config import VerificationSection


def classes_of(settings: VerificationSection) -> dict[str, Thresholds]:
    """Thresholds by class, bf16 first if it is admitted. Raises UserError if there are none, or they can't be read."""
    found: dict[str, Thresholds] = {}
    if settings.thresholds or settings.thresholds_file is not None or not settings.classes:
        found[BF16] = thresholds_of(settings)
    for name, file in settings.classes.items():
        if not file.exists():
            raise UserError(
                f"[verification.classes] {name}: there are no thresholds in {file} yet: "
                f"`coordinator calibrate --precision {name} --config RUN_FILE` measures them"
            )
        found[name] = Thresholds.from_toml(file)
    return found
