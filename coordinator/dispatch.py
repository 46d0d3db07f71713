"""What to lease next, as pure decisions. The order of tasks and every seed are the coordinator's alone."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol, TypeVar

from protocol import policy

SEED_BITS = 63


def sample_seed(secret: bytes, sample_id: str) -> int:
    """The 63-bit sampling seed of a sample: derived once from the run's secret, the same at every attempt."""
    digest = hmac.new(secret, b"seed\0" + sample_id.encode(), sha256).digest()
    return int.from_bytes(digest[:8], "little") >> (64 - SEED_BITS)


def choose_environment(weights: Mapping[str, float], dispatched: Mapping[str, int]) -> str:
    """The environment that is furthest behind its share of groups; ties go to the first named."""
    total = sum(weights.values())
    n = sum(dispatched.get(name, 0) for name in weights) + 1
    return max(weights, key=lambda name: weights[name] / total * n - dispatched.get(name, 0))


@dataclass(frozen=True, slots=True)
class Grant:
    """How many leases a worker gets now; `reason` says why none, if none."""

    count: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """What is out at the moment, in samples."""

    leased: int
    unconsumed: int
    newcomers_leased: int


def grant(
    *,
    wanted: int,
    newcomer: bool,
    paused: bool,
    load: Load,
    max_staleness: int,
    batch_samples: int,
    newcomer_share: float,
) -> Grant:
    """The capacity rule, and under it the cap on newcomers' share."""
    if paused:
        return Grant(0, "paused")
    count = policy.room(
        max_staleness=max_staleness, batch_samples=batch_samples, leased=load.leased, unconsumed=load.unconsumed
    )
    if count == 0:
        return Grant(0, "capacity")
    if newcomer:
        total = policy.capacity(max_staleness, batch_samples)
        count = min(
            count,
            policy.newcomers_room(total=total, share=newcomer_share, newcomers_leased=load.newcomers_leased),
        )
        if count == 0:
            return Grant(0, "newcomers")
    return Grant(min(count, wanted))


@dataclass(frozen=True, slots=True)
class Share:
    """The most that one worker may have: samples of a group, and live leases. None: no limit of its own."""

    group_samples: int | None
    leases: int | None


EVERYTHING = Share(None, None)


def share_of(share: float, *, others_active: bool, group_size: int, capacity: int) -> Share:
    """A worker's share while others are active, at least one of each; alone it may have everything."""
    if share >= 1.0 or not others_active:
        return EVERYTHING
    return Share(max(1, int(share * group_size)), max(1, int(share * capacity)))


def within_share(granted: Grant, live: int, most: int | None, reason: str = "share") -> Grant:
    """A grant to somebody that has `live` leases already and may have `most`; `reason` says why none, if none."""
    if most is None or granted.count == 0:
        return granted
    count = min(granted.count, most - live)
    return Grant(count) if count > 0 else Grant(0, reason)


def newcomers_of_address(share: float, address_share: float, capacity: int, *, others_wait: bool) -> int | None:
    """The most leases that newcomers from one address have together while newcomers elsewhere want some too.

    Keys cost nothing, addresses do: without this, one machine with many keys would take all that newcomers get.
    """
    return max(1, int(address_share * share * capacity)) if others_wait else None


@dataclass(frozen=True, slots=True)
class Trial:
    """A worker's hardware class; whether it is in shadow, and how many more leases it may have then. None: no limit."""

    hardware: str
    shadow: bool
    room: int | None


def within_trial(granted: Grant, room: int | None) -> Grant:
    """A grant to a worker whose hardware may have so many more leases."""
    if room is None or granted.count == 0:
        return granted
    return Grant(min(granted.count, room)) if room > 0 else Grant(0, "hardware")


class InGroup(Protocol):
    """A sample, as far as shares go."""

    @property
    def group_id(self) -> str: ...


S = TypeVar("S", bound=InGroup)


def within_groups(samples: Sequence[S], used: Mapping[str, int], most: int | None) -> list[S]:
    """The samples, in order, that leave no group with more than `most` for a worker that has used so many of each."""
    if most is None:
        return list(samples)
    taken = dict(used)
    chosen: list[S] = []
    for sample in samples:
        if taken.get(sample.group_id, 0) < most:
            taken[sample.group_id] = taken.get(sample.group_id, 0) + 1
            chosen.append(sample)
    return chosen


def order_for_worker(sample_ids: Sequence[str], held_before: set[str]) -> list[str]:
    """Samples this worker has not held before come first: giving a sample up never buys a better one."""
    return sorted(sample_ids, key=lambda sample_id: sample_id in held_before)
