"""Counts over all that ever was, without reading all that ever was: what is final is counted once, and the rest when asked.

A *source* is a table that grows at one end. What lies before its mark is final and stands in the tallies; `total` adds what
lies behind it, which is little more than what is under way. Only upkeep moves marks, a part at a time, by `advance`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Column, ColumnElement, Select, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store import many, marks
from coordinator.store import tables as t

# Who writes asks for the time first, and some milliseconds later for a number, and is seen when it commits. What is so old has
# no older neighbour to come: of a process that falls silent in between, PostgreSQL ends the session after a minute.
_SETTLED_S = 120.0
_UNDER_WAY = ("pending", "verifying", "accepted", "served")
_BETWEEN = "|"  # the parts of a key
Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Source:
    """Rows of a table in the order of `position`, which never goes back. Its mark has the same `name`.

    `final`: from a mark and the time, the position before which no row changes or is added any more; None if that is unknown.
    """

    name: str
    position: Column[Any]
    final: Callable[[AsyncConnection, Any, float], Awaitable[float | None]]


@dataclass(frozen=True, slots=True)
class Tally:
    """Rows of a source, counted by `key`; `but_for` excepts those that never become final, which are counted each time."""

    name: str
    source: _Source
    key: tuple[Column[Any], ...]
    but_for: ColumnElement[bool] | None = None
    amount: ColumnElement[Any] = field(default_factory=func.count)

    def between(self, mark: Any, end: Any | None = None) -> Select[Any]:
        """The count of what lies from `mark` on, before `end` if there is one."""
        statement = self._all().where(self.source.position >= mark)
        if end is not None:
            statement = statement.where(self.source.position < end)
        return statement if self.but_for is None else statement.where(~self.but_for)

    def excepted(self) -> Select[Any] | None:
        """The count of what never becomes final."""
        return None if self.but_for is None else self._all().where(self.but_for)

    def _all(self) -> Select[Any]:
        return (
            select(*self.key, self.amount.label("amount")).select_from(self.source.position.table).group_by(*self.key)
        )


async def _rollouts_final(connection: AsyncConnection, mark: float, at: float) -> float | None:
    """Up to the oldest that is under way, as one statement finds it: between two, one may go from one state to another."""
    oldest = (await connection.execute(_OLDEST_UNDER_WAY)).one()
    return min([at - _SETTLED_S, *(received_at for received_at in oldest if received_at is not None)])


_OLDEST_UNDER_WAY = select(
    *(
        select(func.min(t.rollouts.c.received_at)).where(t.rollouts.c.state == state).scalar_subquery().label(state)
        for state in _UNDER_WAY
    )
)


async def _consumptions_final(connection: AsyncConnection, mark: int, at: float) -> float | None:
    """Up to the last batch that a checkpoint holds."""
    acknowledged = t.batches.c.acknowledged_at.is_not(None)
    last = (await connection.execute(select(func.max(t.batches.c.batch)).where(acknowledged))).scalar()
    return None if last is None else last + 1


def _appended(number: Column[Any], written_at: Column[Any]) -> Callable[..., Awaitable[float | None]]:
    """Of rows that never change, in the order of their numbers."""

    async def final(connection: AsyncConnection, mark: int, at: float) -> float | None:
        settled = (number >= mark) & (written_at <= at - _SETTLED_S)
        last = (await connection.execute(select(func.max(number)).where(settled))).scalar()
        return None if last is None else last + 1

    return final


_ROLLOUTS = _Source("rollouts", t.rollouts.c.received_at, _rollouts_final)
_CONSUMPTIONS = _Source("consumptions", t.consumptions.c.batch, _consumptions_final)
_DROPS = _Source("drops", t.drops.c.drop_id, _appended(t.drops.c.drop_id, t.drops.c.dropped_at))
_LEDGER = _Source("ledger", t.ledger.c.entry_id, _appended(t.ledger.c.entry_id, t.ledger.c.created_at))

ROLLOUTS = Tally("rollouts", _ROLLOUTS, (t.rollouts.c.state, t.rollouts.c.precision, t.rollouts.c.spans))
STALENESS = Tally("staleness", _CONSUMPTIONS, (t.consumptions.c.staleness,))
# Refusals that cost nothing have one line per reason, which counts on.
DROPS = Tally(
    "drops", _DROPS, (t.drops.c.reason,), but_for=t.drops.c.rollout_id.is_(None), amount=func.sum(t.drops.c.count)
)
LEDGER = Tally("ledger", _LEDGER, (t.ledger.c.kind,), amount=func.sum(t.ledger.c.amount))
ALL = (ROLLOUTS, STALENESS, DROPS, LEDGER)


async def total(connection: AsyncConnection, tally: Tally) -> Counter[Key]:
    """The count of all that ever was, by key."""
    mark = _at(tally.source, await marks.read(connection, tally.source.name))
    counted: Counter[Key] = Counter()
    kept = select(t.tallies.c.key, t.tallies.c.amount).where(t.tallies.c.name == tally.name)
    for row in await connection.execute(kept):
        counted[tuple(row.key.split(_BETWEEN, len(tally.key) - 1))] += int(row.amount)
    excepted = tally.excepted()
    for statement in (tally.between(mark), *(() if excepted is None else (excepted,))):
        counted.update(await _counted(connection, statement))
    return counted


async def advance(connection: AsyncConnection, tally: Tally, at: float, limit: int) -> bool:
    """Count some `limit` rows that have become final; whether there are more."""
    source, position = tally.source, tally.source.position
    mark = _at(source, await marks.seize(connection, source.name))
    end = await source.final(connection, mark, at)
    if end is None or end <= mark:
        return False
    end, more = _at(source, end), False
    ahead = select(position).where(position >= mark, position < end).order_by(position)
    beyond = (await connection.execute(ahead.offset(limit).limit(1))).scalar()
    if beyond is not None and beyond == mark:  # they lie in one place
        beyond = (await connection.execute(ahead.where(position > mark).limit(1))).scalar()
    if beyond is not None:
        end, more = beyond, True
    await _add(connection, tally.name, await _counted(connection, tally.between(mark, end)))
    await marks.move(connection, source.name, end)
    return more


def _at(source: _Source, mark: float) -> Any:
    """As the position's own type: an index finds no other."""
    return source.position.type.python_type(mark)


async def _counted(connection: AsyncConnection, statement: Select[Any]) -> Counter[Key]:
    found: Counter[Key] = Counter()
    for *key, amount in await connection.execute(statement):
        found[tuple(map(str, key))] += int(amount)
    return found


async def _add(connection: AsyncConnection, name: str, counted: Counter[Key]) -> None:
    mine = t.tallies.c.name == name
    known = set((await connection.execute(select(t.tallies.c.key).where(mine))).scalars())
    amounts = {_BETWEEN.join(key): amount for key, amount in counted.items()}
    for key in sorted(known & amounts.keys()):
        more = update(t.tallies).where(mine, t.tallies.c.key == key)
        await connection.execute(more.values(amount=t.tallies.c.amount + amounts[key]))
    new = sorted(amounts.keys() - known)
    await many.insert(connection, t.tallies, [{"name": name, "key": key, "amount": amounts[key]} for key in new])
