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


@lru_cache(maxsize=64)
def _insert(table: Table, names: tuple[str, ...]) -> Insert:
    rows = given({name: table.c[name].type for name in names})
    return table.insert().from_select(list(names), select(*(rows.c[name] for name in names)))


def given(types: Mapping[str, TypeEngine[Any]]) -> TableValuedAlias:
    """Rows made of parameters, each of which is an array that holds a column."""
    kinds = {name: unbounded(kind) for name, kind in types.items()}
    arrays = (bindparam(name, type_=ARRAY(kind, dimensions=1)) for name, kind in kinds.items())
    columns = (column(name, kind) for name, kind in kinds.items())
    return func.unnest(*arrays).table_valued(*columns).render_derived()


def _turned(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}
