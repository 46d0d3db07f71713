"""Executes the tests over many rollouts: adds what was observed, and says which tests alarm.

In the transaction of the verdict that brought the observation: evidence and verdict are there together, or neither is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store import events, groups
from coordinator.store import evidence as store
from coordinator.store.evidence import Kept
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
    connection: AsyncConnection,
    worker_id: str,
    observations: Mapping[str, float],
    tokens: int,
    pooled: Pooled,
    at: float,
    *,
    shadow: bool = False,
) -> list[Alarm]:
    """Add a worker's observations (Y by test, of that many tokens); the alarms that they raise.

    `shadow`: made on hardware that bounds were not measured on. What is kept of those stands apart and only alerts: so
    neither do they ban, nor can alarms among them wipe out what the worker did elsewhere.
    """
    kept = await store.of_worker(connection, worker_id)
    alarms: list[Alarm] = []
    for test in pooled.tests:
        if test.name not in observations:
            continue
        key = SHADOW + test.name if shadow else test.name
        before = kept.get(key, Kept(Evidence(key)))
        now = observe(before.evidence, observations[test.name], tokens)
        if is_alarmed(now, test, pooled):
            alarms.append(await _alarm(connection, worker_id, now, test, pooled, at, shadow))
            kept[key] = Kept(restarted(now), at)
        else:
            kept[key] = Kept(now, before.alarmed_at)
        await store.save(connection, worker_id, kept[key], at)
    await _watch(connection, worker_id, kept, pooled, at)
    return alarms


async def _alarm(
    connection: AsyncConnection,
    worker_id: str,
    now: Evidence,
    test: PooledTest,
    pooled: Pooled,
    at: float,
    shadow: bool,
) -> Alarm:
    """The alarm, which bans nobody in shadow, nor if most workers are on their way to the same one."""
    if shadow:
        return Alarm(worker_id, test.name, ALERT, f"in shadow, {_words(now, test, pooled)}")
    level = alarm_level(test, pooled)
    others = await store.others(connection, test.name, worker_id, at - _ACTIVE_S)
    words = _words(now, test, pooled)
    if test.action == STRIKE and is_common([1.0, *(log_e / level for log_e in others)], pooled.watch):
        words += "; most workers show the same, so that nobody is banned for it: calibrate again"
        return Alarm(worker_id, test.name, ALERT, words)
    return Alarm(worker_id, test.name, test.action, words)


async def _watch(
    connection: AsyncConnection, worker_id: str, kept: Mapping[str, Kept], pooled: Pooled, at: float
) -> None:
    """Watch a worker closely while a test is far on its way to an alarm, or after one, until it is pardoned."""
    was = await store.is_watched(connection, worker_id)
    level = pooled.watch / 2 if was else pooled.watch  # not to and fro
    suspects = [
        f"{test.name} at {kept[test.name].evidence.log_e:.1f} of {alarm_level(test, pooled):.1f}"
        for test in pooled.tests
        if test.name in kept and _is_suspect(kept[test.name], level * alarm_level(test, pooled))
    ]
    if bool(suspects) == was:
        return
    await store.set_watched(connection, worker_id, bool(suspects))
    await events.record(
        connection,
        at=at,
        actor="verifier",
        action="watch" if suspects else "unwatch",
        subject=worker_id,
        detail=", ".join(suspects),
    )


def _is_suspect(kept: Kept, level: float) -> bool:
    return kept.alarmed_at is not None or kept.evidence.log_e >= level


async def compare_group(connection: AsyncConnection, group_id: str, pooled: Pooled, at: float) -> list[Alarm]:
    """Compare the workers of a complete group with one another, once; the alarms that it raises."""
    if not await store.begin_comparison(connection, group_id):
        return []
    group = await groups.get(connection, group_id)
    assert group is not None
    members = await store.members(connection, group_id)
    found = compare(
        members,
        await store.given_up(connection, group_id),
        usual_reward=await store.usual_reward(connection, group),
        near_tie_share=pooled.near_tie_share,
    )
    alarms: list[Alarm] = []
    for worker_id, statistics in found.items():
        values = {test.name: normalised(test, statistics) for test in pooled.tests}
        observations = {name: value for name, value in values.items() if value is not None}
        tokens = sum(member.tokens for member in members if member.worker_id == worker_id)
        alarms += await add(connection, worker_id, observations, tokens, pooled, at)
    return alarms


def _words(evidence: Evidence, test: PooledTest, pooled: Pooled) -> str:
    return (
        f"{test.name}: over {evidence.observations} observations of {evidence.tokens} tokens the log evidence reached "
        f"{evidence.log_e:.1f} (alarm at {alarm_level(test, pooled):.1f}; an honest worker expects at most {test.alpha:g} "
        f"such alarms in {pooled.observations_per_month:.0f} observations)"
    )
