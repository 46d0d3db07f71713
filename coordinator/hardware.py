"""Which kinds of hardware a run takes at their word, as pure decisions.

Thresholds hold for the hardware that calibration covered. Rollouts of any other are in *shadow*: verified like all others,
trained on if accepted, and where numerics might be to blame for a rejection it is recorded and not punished. What could
be had by always naming new hardware is bounded: such workers count as newcomers and are audited in full, `shadow_classes`
kinds are in shadow at a time and `shadow_rollouts` of each are leased out, until the operator admits or refuses them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

DEFAULT_HARDWARE = ("* CPU, *",)


class HardwareState(enum.StrEnum):
    """REFUSED takes nothing at all."""

    ADMITTED = "admitted"
    SHADOW = "shadow"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class HardwareRules:
    """`patterns`: of admitted classes, with * and ?. `calibrated`: for each precision, the classes that its thresholds were
    measured on. The other two bound what is tried of the rest."""

    patterns: tuple[str, ...] = DEFAULT_HARDWARE
    calibrated: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    shadow_rollouts: int = 256
    shadow_classes: int = 8


def state_of(name: str, precision: str, decision: str | None, rules: HardwareRules) -> HardwareState:
    """The state of a class. `decision`: the operator's, which prevails; None if there is none."""
    if decision is not None:
        return HardwareState(decision)
    known = name in rules.calibrated.get(precision, ()) or any(fnmatchcase(name, each) for each in rules.patterns)
    return HardwareState.ADMITTED if known else HardwareState.SHADOW


def is_alert(rejected: int) -> bool:
    """Whether the so-manyth rejection of a class in shadow is worth an alert: the 1st, 2nd, 4th, 8th, … so that a flood of
    them hides no other alert."""
    return rejected > 0 and rejected & (rejected - 1) == 0
