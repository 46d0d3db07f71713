"""What an operator may change while the run goes on, and within which bounds. Pure.

A knob that was turned holds until it is turned again, over restarts too; the run file's value holds for the others.
Every process looks about once a second, so that all replicas agree within that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from coordinator.scheduling import Scheduling
from protocol.errors import UserError


@dataclass(frozen=True, slots=True)
class Knob:
    """`low` to `high`, both admitted."""

    low: float
    high: float
    whole: bool
    text: str


KNOBS: Mapping[str, Knob] = {
    "audit_fraction": Knob(0.01, 1.0, False, "least share of rollouts that are prefilled"),
    "max_staleness": Knob(0, 64, True, "versions that the trainer may be ahead of a rollout's oldest token"),
    "worker_share": Knob(0.01, 1.0, False, "largest share of a group and of leases for one worker while others work"),
}
DRAINING = "draining"  # no knob that a person turns: the actions drain and resume set it


def check(name: str, value: float) -> float:
    """The value, if the knob may be set to it. Raises UserError."""
    knob = KNOBS.get(name)
    if knob is None:
        raise UserError(f"there is no setting {name!r} that may change while the run goes on: {', '.join(KNOBS)}")
    if not math.isfinite(value) or not knob.low <= value <= knob.high or (knob.whole and value != int(value)):
        kind = "a whole number" if knob.whole else "a number"
        raise UserError(f"{name} must be {kind} from {knob.low:g} to {knob.high:g}, got {value!r}")
    return value


def scheduling(configured: Scheduling, turned: Mapping[str, float]) -> Scheduling:
    """The run file's scheduling with the knobs that were turned."""
    return replace(
        configured,
        max_staleness=int(turned.get("max_staleness", configured.max_staleness)),
        worker_share=turned.get("worker_share", configured.worker_share),
        draining=bool(turned.get(DRAINING, 0.0)),
    )


def values(configured: Scheduling, audit_fraction: float, turned: Mapping[str, float]) -> dict[str, float]:
    """Every knob as it stands."""
    now = scheduling(configured, turned)
    return {
        "audit_fraction": turned.get("audit_fraction", audit_fraction),
        "max_staleness": now.max_staleness,
        "worker_share": now.worker_share,
    }
