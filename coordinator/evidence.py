"""Executes the tests over many rollouts: adds what was observed, and says which tests alarm.

In the transaction of the verdict that brought the observation: evidence and verdict are there together, or neither is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Row

from coordinator.store import events
from coordinator.store import evidence as store
from coordinator.store.evidence import Book, Kept
from coordinator.verification.comparison import compare
from coordinator.verification.pooled import ALERT, STRIKE, Pooled, PooledTest
from coordinator.verification.pooling import (
    Evidence,
    alarm_level,
    is_alarmed,
    is_common,
    normalised,
    observe,
    restarted,
)

_ACTIVE_S = 3600.0
SHADOW = "shadow:"  # before the test's name


@dataclass(frozen=True, slots=True)
class Alarm:
    """A test that a worker failed. `action` is the test's; `detail` what it found, in words."""

    worker_id: str
    test: str
    action: str
    detail: str


async def add(
    book: Book,
    worker_id: str,
    observations: Mapping[str, float],
    tokens: int,
    pooled: Pooled,
    *,
    shadow: bool = False,
) -> list[Alarm]:
    """Add a worker's observations (Y by test, of that many tokens); the alarms that they raise. The book knows the worker.

    `shadow`: made on hardware that bounds were not measured on. What is kept of those stands apart and only alerts: so
    neither do they ban, nor can alarms among them wipe out what the worker did elsewhere.
    """
    alarms: list[Alarm] = []
    for test in pooled.tests:
        if test.name not in observations:
            continue
        key = SHADOW + test.name if shadow else test.name
        before = book.of_worker(worker_id).get(key, Kept(Evidence(key)))
        now = observe(before.evidence, observations[test.name], tokens)
        if is_alarmed(now, test, pooled):
            alarms.append(await _alarm(book, worker_id, now, test, pooled, shadow))
            book.keep(worker_id, Kept(restarted(now), book.at))
        else:
            book.keep(worker_id, Kept(now, before.alarmed_at))
    await _watch(book, worker_id, pooled)
    return alarms


async def _alarm(book: Book, worker_id: str, now: Evidence, test: PooledTest, pooled: Pooled, shadow: bool) -> Alarm:
    """The alarm, which bans nobody in shadow, nor if most workers are on their way to the same one."""
    if shadow:
        return Alarm(worker_id, test.name, ALERT, f"in shadow, {_words(now, test, pooled)}")
    level = alarm_level(test, pooled)
    await book.write()  # what this transaction has learned of the others counts
    others = await store.others(book.connection, test.name, worker_id, book.at - _ACTIVE_S)
    words = _words(now, test, pooled)
    if test.action == STRIKE and is_common([1.0, *(log_e / level for log_e in others)], pooled.watch):
        words += "; most workers show the same, so that nobody is banned for it: calibrate again"
        return Alarm(worker_id, test.name, ALERT, words)
    return Alarm(worker_id, test.name, test.action, words)


async def _watch(book: Book, worker_id: str, pooled: Pooled) -> None:
    """Watch a worker closely while a test is far on its way to an alarm, or after one, until it is pardoned."""
    kept, was = book.of_worker(worker_id), book.is_watched(worker_id)
    level = pooled.watch / 2 if was else pooled.watch  # not to and fro
    suspects = [
        f"{test.name} at {kept[test.name].evidence.log_e:.1f} of {alarm_level(test, pooled):.1f}"
        for test in pooled.tests
        if test.name in kept and _is_suspect(kept[test.name], level * alarm_level(test, pooled))
    ]
    if bool(suspects) == was:
        return
    await book.set_watched(worker_id, bool(suspects))
    await events.record(
        book.connection,
        at=book.at,
        actor="verifier",
        action="watch" if suspects else "unwatch",
        subject=worker_id,
        detail=", ".join(suspects),
    )


def _is_suspect(kept: Kept, level: float) -> bool:
    return kept.alarmed_at is not None or kept.evidence.log_e >= level


async def compare_groups(book: Book, completed: Sequence[Row], pooled: Pooled) -> list[Alarm]:
    """Compare the workers of each complete group with one another, once; the alarms that it raises."""
    of = await store.begin_comparison(book.connection, completed)
    if not of:
        return []
    ids = [group.group_id for group in of]
    members = await store.members(book.connection, ids)
    given_up = await store.given_up(book.connection, ids)
    usual = await _usual_rewards(book, of)
    await book.read({member.worker_id for some in members.values() for member in some})
    alarms: list[Alarm] = []
    for group in of:
        found = compare(
            members[group.group_id],
            given_up[group.group_id],
            usual_reward=usual[group.environment],
            near_tie_share=pooled.near_tie_share,
        )
        await book.read(found)
        for worker_id, statistics in found.items():
            values = {test.name: normalised(test, statistics) for test in pooled.tests}
            observations = {name: value for name, value in values.items() if value is not None}
            tokens = sum(member.tokens for member in members[group.group_id] if member.worker_id == worker_id)
            alarms += await add(book, worker_id, observations, tokens, pooled)
    return alarms


async def _usual_rewards(book: Book, of: Sequence[Row]) -> dict[str, float | None]:
    """By environment, before the first of these groups."""
    first: dict[str, int] = {}
    for group in of:
        first[group.environment] = min(first.get(group.environment, group.ordinal), group.ordinal)
    return {name: await store.usual_reward(book.connection, name, ordinal) for name, ordinal in first.items()}


def _words(evidence: Evidence, test: PooledTest, pooled: Pooled) -> str:
    return (
        f"{test.name}: over {evidence.observations} observations of {evidence.tokens} tokens the log evidence reached "
        f"{evidence.log_e:.1f} (alarm at {alarm_level(test, pooled):.1f}; an honest worker expects at most {test.alpha:g} "
        f"such alarms in {pooled.observations_per_month:.0f} observations)"
    )
