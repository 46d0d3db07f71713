"""Which of the trainer's alarms begin and end with a step. Pure.

A step names the alarms that last while it is made. One that the step before did not have begins; one that only the step
before had is over. A step may be reported again (its trainer was killed): what its earlier report began or ended is no news.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

_PREFIX = "alarm/"


def lasting(metrics: Mapping[str, float]) -> frozenset[str]:
    """The alarms that a step's stored numbers name."""
    return frozenset(name.removeprefix(_PREFIX) for name in metrics if name.startswith(_PREFIX))


def with_alarms(metrics: Mapping[str, float], alarms: Collection[str]) -> dict[str, float]:
    """A step's numbers as they are stored, so that `lasting` finds its alarms."""
    return {**metrics, **{f"{_PREFIX}{name}": 1.0 for name in alarms}}


def changes(
    now: Collection[str], before: Collection[str], reported: Collection[str] | None
) -> tuple[list[str], list[str]]:
    """(those that begin, those that are over). `before`: of the step before; `reported`: of this step's earlier report."""
    begun = [name for name in now if name not in before and name not in (reported or ())]
    over = [name for name in before if name not in now and (reported is None or name in reported)]
    return sorted(begun), sorted(over)
