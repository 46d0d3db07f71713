"""The numbers that leasing goes by, and how old what it knows may be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scheduling:
    """The run's numbers. Sizes are in samples unless named otherwise, times in seconds."""

    groups_per_batch: int
    group_size: int
    min_group: int
    max_staleness: int
    lease_term_s: float
    group_deadline_s: float
    newcomer_share: float
    probation_rollouts: int
    worker_share: float = 1.0
    newcomer_address_share: float = 0.5
    draining: bool = False  # no new groups

    @property
    def batch_samples(self) -> int:
        return self.groups_per_batch * self.group_size


@dataclass(frozen=True, slots=True)
class Freshness:
    """How old, in seconds, each of these may be when leases are granted; 0 asks the database every time.

    `load_s`: what is out in all, to which this process adds what it grants: the capacity rule bounds waste, and replicas may
    exceed it by what they grant meanwhile. `pace_s`: a worker's speed. `stragglers_s`: between looks for
    leases that hold up a group. `seen_s`: when a worker was seen (a quarter of a lease's term at most). `overdue_s`: between
    looks for leases that ran out, which a sweep frees too. `rules_s`: the trainer's pace, and what operators decided on
    kinds of hardware. `renewal_terms`: the share of a lease's term within which another renewal changes nothing (workers
    renew four times a term).
    """

    load_s: float = 0.0
    pace_s: float = 0.0
    stragglers_s: float = 0.0
    seen_s: float = 0.0
    overdue_s: float = 0.0
    rules_s: float = 0.0
    renewal_terms: float = 0.0


EXACT = Freshness()
SERVING = Freshness(
    load_s=1.0, pace_s=15.0, stragglers_s=1.0, seen_s=5.0, overdue_s=1.0, rules_s=1.0, renewal_terms=0.125
)
