"""How fast a worker is, and what that means for its leases. Pure: measured numbers in, decisions out.

Three things follow from a worker's speed and the trainer's:
    within_speed   no more leases at once than it finishes while they can still be accepted (Little's law)
    too_slow       none, if not even its fastest rollout of late came in within that time
    take_over      near the end of a group, a straggler's sample goes to a worker that is much faster

A worker that hands in nothing for `WINDOW_S` is measured anew: it gets leases as one that was never seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW_S = 600.0
_MEASURED_FROM = 8  # rollouts; fewer say nothing
_SLACK = 1.5  # a worker may get faster: it has room to show it
_MUCH = 2.0  # a take-over throws work away
_END_OF_GROUP = 4  # at most a quarter of a group's samples are out


@dataclass(frozen=True, slots=True)
class Pace:
    """What a worker did of late. `rollouts_per_s`: infinite while nothing can be said; `tokens_per_s`: of one sequence;
    `shortest_s`: from lease to receipt."""

    rollouts_per_s: float
    tokens_per_s: float
    shortest_s: float


@dataclass(frozen=True, slots=True)
class OutLease:
    """A live lease of another worker in a group that waits for little else."""

    lease_id: str
    sample_id: str
    age_s: float
    committed: int
    max_tokens: int
    group_out: int
    group_size: int
    worker_id: str = ""


@dataclass(frozen=True, slots=True)
class Handed:
    """What a worker handed in of late: the `newest` as (tokens, leased at, received at), and when the `first` was received.

    `crowd`: how many were received within `crowd_s` before the newest. That is asked for where all that are known came within
    less time than one takes: they are a small part of what the worker does at once.
    """

    newest: Sequence[tuple[int, float, float]]
    first: float
    crowd: int = 0
    crowd_s: float = 0.0

    @property
    def mean_s(self) -> float:
        """From lease to receipt."""
        return sum(received - leased for _, leased, received in self.newest) / max(1, len(self.newest))

    @property
    def span_s(self) -> float:
        """From the oldest's receipt to the newest's."""
        times = [received for _, _, received in self.newest]
        return max(times) - min(times) if times else 0.0


def pace_of(handed: Handed) -> Pace | None:
    """What a worker does; None if that is too little to say anything.

    Its rate is unbounded while its first rollouts are under way: they all come at about the same time. Time in which the worker
    held no lease does not count: it is ours, not the worker's.
    """
    done = handed.newest
    if len(done) < _MEASURED_FROM:
        return None
    spans = [max(1e-3, received - leased) for _, leased, received in done]
    return Pace(_rate(handed), sum(tokens for tokens, _, _ in done) / sum(spans), min(spans))


def _rate(handed: Handed) -> float:
    """Rollouts per second, over at least the time that one takes."""
    ends = [received for _, _, received in handed.newest]
    since, until = min(ends), max(ends)
    if until - min(since, handed.first) < min(handed.mean_s, WINDOW_S / 2):
        return math.inf
    if handed.crowd:
        return handed.crowd / max(1e-3, handed.crowd_s)
    held = _covered([(max(leased, since), received) for _, leased, received in handed.newest if received > since])
    return sum(received > since for received in ends) / max(1e-3, held)


def _covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Length of the union."""
    total, end = 0.0, -math.inf
    for begin, until in sorted(intervals):
        total += max(0.0, until - max(begin, end))
        end = max(end, until)
    return total


def horizon_s(step_s: float | None, max_staleness: int) -> float | None:
    """How long after its lease a rollout is of use, None if nothing is known or, on-policy, the trainer waits anyway."""
    return None if step_s is None or max_staleness == 0 else (max_staleness + 1) * step_s


def most_leases(pace: Pace | None, horizon: float | None) -> int | None:
    """What the worker finishes in time, at least one; None: no limit."""
    if pace is None or horizon is None or math.isinf(pace.rollouts_per_s):
        return None
    return max(1, math.ceil(_SLACK * pace.rollouts_per_s * horizon - 1e-6))


def too_slow(pace: Pace | None, horizon: float | None) -> bool:
    """Whether whatever it begins now will be too old when it is done."""
    return pace is not None and horizon is not None and pace.shortest_s > horizon


def take_over(out: Sequence[OutLease], pace: Pace | None, lease_term_s: float, most: int) -> list[OutLease]:
    """Which stragglers' samples this worker shall have, the oldest first; their leases are revoked.

    Only near the end of a group, only what has been out for longer than a term, and only where the holder needs more than
    twice the time that this worker does, measured by what it has committed to.
    """
    if pace is None or pace.tokens_per_s <= 0:
        return []
    chosen = []
    for lease in sorted(out, key=lambda each: -each.age_s):
        mine = lease.max_tokens / pace.tokens_per_s
        rate = lease.committed / lease.age_s if lease.age_s > 0 else math.inf
        left = (lease.max_tokens - lease.committed) / rate if rate > 0 else math.inf
        ending = lease.group_out <= max(1, lease.group_size // _END_OF_GROUP)
        if ending and lease.age_s > max(lease_term_s, _MUCH * mine) and left > _MUCH * mine:
            chosen.append(lease)
    return chosen[:most]
