"""When a group goes to the trainer: a pure decision over its accepted rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.policy import oldest_admissible


@dataclass(frozen=True, slots=True)
class Member:
    """An accepted rollout of a group, as far as the decision needs it."""

    rollout_id: str
    oldest_version: int


@dataclass(frozen=True, slots=True)
class Serve:
    """Serve `fresh`; `stale` is dropped and counted."""

    fresh: tuple[str, ...]
    stale: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Too few can be trained on: everything is dropped and counted."""

    stale: tuple[str, ...]
    orphaned: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reopen:
    """`stale` is dropped and its samples are leased again (same seeds); the rest waits."""

    stale: tuple[str, ...]


def decide(
    members: Sequence[Member],
    *,
    trainer_version: int,
    max_staleness: int,
    min_group: int,
    past_deadline: bool,
) -> Serve | Drop | Reopen:
    """What becomes of a group that is complete or past its deadline.

    The staleness gate is hard and goes by the oldest span. A group with at least `min_group` fresh rollouts is served as
    it is: waiting for the rest would only age the others. With fewer it is reopened before its deadline and dropped
    after it.
    """
    oldest = oldest_admissible(trainer_version, max_staleness)
    fresh = tuple(member.rollout_id for member in members if member.oldest_version >= oldest)
    stale = tuple(member.rollout_id for member in members if member.oldest_version < oldest)
    if len(fresh) >= min_group:
        return Serve(fresh, stale)
    if past_deadline:
        return Drop(stale, fresh)
    return Reopen(stale)
