"""One statement for many rows. PostgreSQL gets one array for each column rather than one statement for each row, which costs
both sides several times as much; SQLite, which has no arrays and no round trips, gets the rows.

Statements that every call or two needs are made once: to make one anew costs more than to look up what it compiles to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    CursorResult,
    Executable,
    Insert,
    Table,
    TableValuedAlias,
    Update,
    bindparam,
    column,
    func,
    select,
)
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.types import TypeEngine

from coordinator.store.database import is_any_of, unbounded

Parameter = Callable[[str], ColumnElement[Any]]


async def insert(connection: AsyncConnection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert these rows, which all name the same columns, in this order."""
    if not rows:
        return
    if connection.dialect.name == "sqlite":
        await connection.execute(table.insert(), list(rows))
    else:
        await connection.execute(_insert(table, tuple(rows[0])), _turned(rows))


async def insert_two(
    connection: AsyncConnection,
    table: Table,
    rows: Sequence[Mapping[str, Any]],
    other: Table,
    others: Sequence[Mapping[str, Any]],
) -> None:
    """Insert rows into one table and then into another, in one round trip. They name every column that must not be NULL."""
    if not rows:
        return
    if connection.dialect.name == "sqlite":
        await connection.execute(table.insert(), list(rows))
        await connection.execute(other.insert(), list(others))
    else:
        both = _insert_two(table, tuple(rows[0]), other, tuple(others[0]))
        await connection.execute(both, _turned(rows, "first_") | _turned(others, "then_"))


class InsertAndUpdate:
    """New rows of a table, and an update of those of another that they refer to, in one round trip. The former name every column
    that must not be NULL."""

    def __init__(self, table: Table, update: Update, column: ColumnElement[Any], refers: ColumnElement[Any]) -> None:
        """`update`: of all rows; those are meant whose `column` is what a new row `refers` to."""
        self._table, self._update, self._column, self._refers = table, update, column, refers
        self._about = About(lambda mine: update.where(mine), column)
        self._made: dict[tuple[str, ...], Update] = {}

    async def execute(self, connection: AsyncConnection, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert these, which all name the same columns, in this order."""
        if not rows:
            return
        if connection.dialect.name == "sqlite":
            await connection.execute(self._table.insert(), list(rows))
            await self._about.execute(connection, [row[self._refers.key] for row in rows])
            return
        names = tuple(rows[0])
        if names not in self._made:
            new = _insert(self._table, names, "new_").returning(self._refers).cte("new")
            self._made[names] = self._update.where(self._column == new.c[self._refers.key])
        await connection.execute(self._made[names], _turned(rows, "new_"))


class UpdateMany:
    """An update that is made once for each of many rows of parameters, no two of which concern the same row.

    `statement`: makes it of what stands for each parameter; `types`: those of the parameters.
    """

    def __init__(self, statement: Callable[[Parameter], Update], **types: TypeEngine[Any]) -> None:
        self._each = statement(lambda name: bindparam(name, type_=types[name]))
        self._all = statement(given(types).c.__getitem__)

    async def execute(self, connection: AsyncConnection, rows: Sequence[Mapping[str, Any]]) -> None:
        """Update by these parameters."""
        if not rows:
            return
        if connection.dialect.name == "sqlite":
            await connection.execute(self._each, list(rows))
        else:
            await connection.execute(self._all, _turned(rows))


class About:
    """A statement about the rows whose `column` has one of many values, made once.

    `statement`: makes it of the condition. What else it needs are parameters, by names that are no column's.
    """

    def __init__(self, statement: Callable[[ColumnElement[bool]], Executable], column: ColumnElement[Any]) -> None:
        self._each = statement(column.in_(bindparam("among", expanding=True)))
        self._all = statement(is_any_of(column, bindparam("among", type_=ARRAY(unbounded(column.type)))))

    async def execute(self, connection: AsyncConnection, values: Sequence[Any], **parameters: Any) -> CursorResult[Any]:
        """What becomes of the rows with these values."""
        statement = self._each if connection.dialect.name == "sqlite" else self._all
        return await connection.execute(statement, {"among": list(values), **parameters})


class UpdateTwo:
    """Updates of rows of one table and of those of another that they refer to, in one round trip."""

    def __init__(
        self,
        first: Update,
        column: ColumnElement[Any],
        second: Update,
        other: ColumnElement[Any],
        refers: ColumnElement[Any],
    ) -> None:
        """`first` and `second`: of all rows; those are meant whose `column` has one of many values, and whose `other` is what
        one of those `refers` to."""
        self._each = tuple(
            About(lambda mine, update=update: update.where(mine), of)  # type: ignore[misc]
            for update, of in ((first, column), (second, other))
        )
        values = bindparam("among", type_=ARRAY(unbounded(column.type)))
        changed = first.where(is_any_of(column, values)).returning(refers).cte("changed")
        self._both = second.where(other == changed.c[refers.key])

    async def execute(self, connection: AsyncConnection, values: Sequence[Any], others: Sequence[Any]) -> None:
        """Update the rows with these values, which refer to `others`."""
        if connection.dialect.name == "sqlite":
            for about, some in zip(self._each, (values, others), strict=True):
                await about.execute(connection, some)
        else:
            await connection.execute(self._both, {"among": list(values)})


@lru_cache(maxsize=64)
def _insert(table: Table, names: tuple[str, ...], prefix: str = "") -> Insert:
    """`prefix`: of the parameters' names, in a statement that has others of the columns' names; there SQLAlchemy knows no
    defaults, so that every column must be named which has none in the database."""
    rows = given({name: table.c[name].type for name in names}, prefix)
    return table.insert().from_select(
        list(names), select(*(rows.c[name] for name in names)), include_defaults=not prefix
    )


@lru_cache(maxsize=64)
def _insert_two(table: Table, names: tuple[str, ...], other: Table, others: tuple[str, ...]) -> Insert:
    return _insert(other, others, "then_").add_cte(_insert(table, names, "first_").cte("first"))


def given(types: Mapping[str, TypeEngine[Any]], prefix: str = "") -> TableValuedAlias:
    """Rows made of parameters, each of which is an array that holds a column, whose name it has after `prefix`."""
    kinds = {name: unbounded(kind) for name, kind in types.items()}
    arrays = (bindparam(prefix + name, type_=ARRAY(kind, dimensions=1)) for name, kind in kinds.items())
    columns = (column(name, kind) for name, kind in kinds.items())
    return func.unnest(*arrays).table_valued(*columns).render_derived()


def _turned(rows: Sequence[Mapping[str, Any]], prefix: str = "") -> dict[str, list[Any]]:
    return {prefix + name: [row[name] for row in rows] for name in rows[0]}
