"""Policy versions: what is stale, and how much may be in flight.

`policy_version` counts published weights (not optimizer steps, not checkpoints). Staleness is measured in versions.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """A published version. One number names one manifest digest for ever."""

    version: int
    manifest_digest: str
    withdrawn: bool = False


def staleness(trainer_version: int, rollout_version: int) -> int:
    """How many versions the trainer is ahead of the version that generated a token (≥ 0)."""
    return max(0, trainer_version - rollout_version)


def oldest_admissible(trainer_version: int, max_staleness: int) -> int:
    """The oldest version whose rollouts may still be trained on at `trainer_version`."""
    return max(0, trainer_version - max_staleness)


def capacity(max_staleness: int, batch_samples: int) -> int:
    """How many samples may be outstanding: leased, or received and not yet trained on (those of the running step too).

    More than (max_staleness + 1) · batch could only become stale before the trainer gets to it.
    """
    return (max_staleness + 1) * batch_samples


def room(*, max_staleness: int, batch_samples: int, leased: int, unconsumed: int) -> int:
    """How many more samples may be leased now (≥ 0)."""
    return max(0, capacity(max_staleness, batch_samples) - leased - unconsumed)


def newcomers_room(*, total: int, share: float, newcomers_leased: int) -> int:
    """How many more leases newcomers may hold together, of `total` outstanding leases allowed to all.

    At least one, so that the first worker of a run can begin. Keeps Sybils from leasing everything and falling silent.
    """
    return max(0, max(1, int(total * share)) - newcomers_leased)
