"""Executes verdicts: credit, group and evidence of those that accept by few statements for all; the others one by one.

What those others do is `coordinator.verdicts`' to say. Everything about one rollout happens in one transaction, so that a
verifier killed at any point leaves either no trace or the whole verdict.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sqlalchemy import Row
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator import evidence, verdicts
from coordinator.evidence import Alarm
from coordinator.store import database, events, groups, hardware, rollouts, workers
from coordinator.store.database import Database, Lane
from coordinator.store.evidence import Book
from coordinator.verdicts import Rules
from protocol.ledger import Entry, EntryKind
from protocol.rollout import Outcome, Verdict

log = logging.getLogger(__name__)

_AT_ONCE = 128


class _Alarmed(Exception):
    """A test over many rollouts alarms, and may ban: these verdicts are to be written alone."""


async def record(db: Database, found: Mapping[str, Verdict], *, verifier: str, rules: Rules) -> None:
    """Write verdicts by rollout, so many in a transaction that it is short; if one can't be written, the others are.

    Those that accept are written beside other writers; what may end in a ban is written alone.
    """
    found = {key: replace(verdict, detail=events.storable(verdict.detail)) for key, verdict in found.items()}
    accepted = {key: verdict for key, verdict in found.items() if verdict.outcome is Outcome.ACCEPTED}
    others = {key: verdict for key, verdict in found.items() if key not in accepted}
    for some in (*_parts(accepted), *_parts(others)):
        try:
            await _record(db, some, verifier, rules)
        except IntegrityError:
            await _record_each(db, some, verifier, rules)


async def _record_each(db: Database, found: Mapping[str, Verdict], verifier: str, rules: Rules) -> None:
    """One by one. What can't be written is claimed again when its claim runs out, and given up in the end."""
    for rollout_id, verdict in found.items():
        try:
            await _record(db, {rollout_id: verdict}, verifier, rules)
        except IntegrityError:
            log.exception("a verdict contradicts what is stored", extra={"action": "verdict", "rollout_id": rollout_id})


async def _record(db: Database, found: Mapping[str, Verdict], verifier: str, rules: Rules) -> None:
    accept = all(verdict.outcome is Outcome.ACCEPTED for verdict in found.values())
    try:
        await _record_in(Lane.VERDICTS if accept else Lane.ALONE, db, found, verifier, rules)
    except _Alarmed:
        await _record_in(Lane.ALONE, db, found, verifier, rules)


async def _record_in(lane: Lane, db: Database, found: Mapping[str, Verdict], verifier: str, rules: Rules) -> None:
    async with db.write(lane) as connection:
        at, alone = await database.now(connection), lane is Lane.ALONE
        await record_all(connection, found, verifier=verifier, at=at, rules=rules, alone=alone)


def _parts(found: Mapping[str, Verdict]) -> list[dict[str, Verdict]]:
    items = list(found.items())
    return [dict(items[begin : begin + _AT_ONCE]) for begin in range(0, len(items), _AT_ONCE)]


async def record_all(
    connection: AsyncConnection,
    found: Mapping[str, Verdict],
    *,
    verifier: str,
    at: float,
    rules: Rules,
    alone: bool = True,
) -> int:
    """Write verdicts by rollout; how many were written. One whose claim this verifier no longer holds is not.

    `alone`: whether the transaction has `Lane.ALONE`, which all but acceptance needs.
    """
    rows = {row.rollout_id: row for row in await rollouts.claimed(connection, list(found), verifier)}
    accepted = [row for row in rows.values() if found[row.rollout_id].outcome is Outcome.ACCEPTED]
    alarms = await _accept(connection, accepted, found, verifier, at, rules)
    if alarms and not alone:
        raise _Alarmed
    await verdicts.act_on(connection, alarms, at, rules.max_strikes)
    for rollout_id in rows:
        if found[rollout_id].outcome is not Outcome.ACCEPTED:
            await verdicts.turn_down(connection, rollout_id, found[rollout_id], verifier=verifier, at=at, rules=rules)
    return len(rows)


async def _accept(
    connection: AsyncConnection,
    rows: Sequence[Row],
    found: Mapping[str, Verdict],
    verifier: str,
    at: float,
    rules: Rules,
) -> list[Alarm]:
    """Accept these; the alarms that are to be acted on."""
    if not rows:
        return []
    await verdicts.insert(connection, {row.rollout_id: found[row.rollout_id] for row in rows}, verifier, at)
    standings = await workers.known(connection, sorted({row.worker_id for row in rows}))
    good = [row for row in rows if not standings[row.worker_id].standing.banned]
    for row in rows:
        if standings[row.worker_id].standing.banned:
            await rollouts.drop(connection, row, "banned", at, again=True)
    await _credit(connection, good, {name: known.standing.accepted for name, known in standings.items()}, at, rules)
    completed = await _put_into_groups(connection, good, at)
    shadows = await hardware.shadow_classes(connection, [row.lease_id for row in good])
    for name, count in Counter(shadows.values()).items():
        await hardware.count_verdict(connection, name, accepted=True, count=count)
    book = Book(connection, at)
    await book.read({row.worker_id for row in good})
    alarms: list[Alarm] = []
    for row in good:
        verdict = found[row.rollout_id]
        if verdict.audited:
            observed, pooled = events.finite(verdict.observations), rules.pooled_of(row.precision)
            in_shadow = row.lease_id in shadows
            alarms += await evidence.add(book, row.worker_id, observed, row.tokens, pooled, shadow=in_shadow)
    alarms += await evidence.compare_groups(book, completed, next(iter(rules.pooled.values())))
    await book.write()
    return alarms


async def _credit(
    connection: AsyncConnection, rows: Sequence[Row], accepted: Mapping[str, int], at: float, rules: Rules
) -> None:
    """One credit each, and word of who has left probation by them."""
    await workers.credit(
        connection, [Entry(row.worker_id, EntryKind.CREDIT, row.tokens, row.rollout_id) for row in rows], at
    )
    for worker_id, count in Counter(row.worker_id for row in rows).items():
        if accepted[worker_id] < rules.probation_rollouts <= accepted[worker_id] + count:
            detail = f"{rules.probation_rollouts} rollouts accepted: probation is over"
            await events.record(
                connection, at=at, actor="verifier", action="established", subject=worker_id, detail=detail
            )


async def _put_into_groups(connection: AsyncConnection, rows: Sequence[Row], at: float) -> list[Row]:
    """The groups that these rollouts complete, which are ready then."""
    theirs = {row.group_id: row for row in await groups.get_all(connection, sorted({row.group_id for row in rows}))}
    in_time = [row for row in rows if theirs[row.group_id].state == "open"]
    for row in rows:
        if theirs[row.group_id].state != "open":
            # Its group went out incomplete, or was dropped: the work is credited, but comes too late to be trained on.
            await rollouts.drop(connection, row, "late", at, again=False)
    await rollouts.set_state(connection, [row.rollout_id for row in in_time], "accepted")
    await groups.set_samples(connection, [row.sample_id for row in in_time], "accepted")
    touched = sorted({row.group_id for row in in_time})
    completed = sorted(set(touched) - await groups.incomplete(connection, touched))
    await groups.set_states(connection, completed, "ready")
    return [theirs[group_id] for group_id in completed]
