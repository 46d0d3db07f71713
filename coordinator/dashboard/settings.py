"""What pages and API need to know of the run file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.scheduling import Scheduling
from protocol.signing import SignedEnvelope
from protocol.statement import Statement


@dataclass(frozen=True, slots=True)
class Settings:
    """What is shown of the run file, where no knob was turned; how tokens are read, and statements signed."""

    scheduling: Scheduling
    audit_fraction: float
    decode: Callable[[Sequence[int]], str]
    sign: Callable[[Statement], SignedEnvelope]
