"""What to lease next, as pure decisions. The order of tasks and every seed are the coordinator's alone."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

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


def order_for_worker(sample_ids: Sequence[str], held_before: set[str]) -> list[str]:
    """Samples this worker has not held before come first: giving a sample up never buys a better one."""
    return sorted(sample_ids, key=lambda sample_id: sample_id in held_before)
