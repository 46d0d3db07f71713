"""The engine, transactions, and the database's clock. SQLite (embedded) and PostgreSQL by the same code."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import sqlite3
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiosqlite
from sqlalchemy import ARRAY, ColumnElement, Float, Select, String, any_, event, func, literal, literal_column, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InvalidatePoolError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.types import TypeEngine

from protocol.errors import UserError

V = TypeVar("V")
_BUSY_TIMEOUT_S = 30.0
_WAL_PATIENCE_S = 10.0
_WAL_RETRY_S = 0.02
_WRITE = {"rollswarm_write": True}
_NOW = "rollswarm_now"
_IDLE_SINCE = "rollswarm_idle_since"
_SURELY_THERE_S = 1.0
# All that the rooms look for has an index, and is little. What PostgreSQL knows of a table lags behind one that grows from
# nothing: plans that read it whole, or join it whole, were right for a hundred rows, and are kept for a hundred thousand. And
# only plain scans of an index mark what is dead in it: where states change all the time, others wade through ten dead entries
# for each that is not.
_BY_INDEX = {
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "max_parallel_workers_per_gather": "0",
    "jit": "off",
}
# A process that is halted, or whose machine vanishes, in the middle of a transaction holds its lane, and with the first one
# that asks for all lanes the whole run waits: PostgreSQL ends its session when nothing has come from it for so long.
_SILENT_S = 60.0
# PostgreSQL's advisory locks. All writers hold the first, together or alone; the others are lanes among those together.
_WRITERS, _GRANTS, _VERDICTS, _TRAINING = range(0x726F6C6C, 0x726F6C70)  # "roll" and what follows it


class Lane(enum.Enum):
    """Which writers a write transaction waits for on PostgreSQL; on SQLite each waits for all.

    What one reads is still so when it writes, as far as its lane goes: each says below what it may rely on. Whatever else it
    writes, it locks before it reads it: leases first, then samples, each in order, so that nobody waits in a circle.
    """

    ALONE = None  # all others: bans, strikes, knobs, withdrawals, whatever is rare
    ROWS = ()  # nobody: renewals, submissions, claims. Relies on rows that it has locked, and that nobody is banned meanwhile
    GRANTS = (_GRANTS,)  # relies on waiting samples, groups and their number, and on what newcomers hold
    VERDICTS = (_VERDICTS,)  # relies on workers, their evidence, groups that are not served, rollouts under judgement
    TRAINING = (_TRAINING,)  # relies on versions, batches, steps, complete groups, rollouts whose state is final
    FEEDING = (_TRAINING, _VERDICTS, _GRANTS)  # relies on all: it closes groups, of which samples may be out or judged


class Database:
    """A pool of connections to the run's database."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.is_sqlite = engine.dialect.name == "sqlite"

    @classmethod
    def open(cls, url: str) -> Database:
        """Open `sqlite+aiosqlite:///…` or `postgresql+asyncpg://…`. Raises UserError for a URL of another kind."""
        try:
            parsed = make_url(url)
        except ArgumentError:
            raise UserError(f"run.database is no database URL: {url!r}") from None
        if parsed.drivername not in ("sqlite+aiosqlite", "postgresql+asyncpg"):
            raise UserError(
                f"run.database names {parsed.drivername!r}; use sqlite+aiosqlite:///FILE or postgresql+asyncpg://…"
            )
        if parsed.drivername == "postgresql+asyncpg":
            settings = _BY_INDEX | {"idle_in_transaction_session_timeout": str(int(_SILENT_S * 1000))}
            engine = create_async_engine(parsed, pool_size=10, connect_args={"server_settings": settings})
            _ping_idle(engine)
            return cls(engine)
        if parsed.database and parsed.database != ":memory:":
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        engine = create_async_engine(
            parsed, connect_args={"timeout": _BUSY_TIMEOUT_S, "async_creator_fn": _connect_sqlite}
        )
        _prepare_sqlite(engine)
        return cls(engine)

    @asynccontextmanager
    async def write(self, lane: Lane = Lane.ALONE) -> AsyncIterator[AsyncConnection]:
        """One read-write transaction: committed at the end of the block, rolled back if it raises.

        What it reads is still so when it writes, as far as its lane goes (on SQLite always). Capacity, the last sample of a
        group, and standings folded onto the stored one depend on that. (A transaction takes milliseconds.)
        """
        async with self.engine.connect() as connection:
            connection = await connection.execution_options(**_WRITE)
            async with connection.begin():
                if not self.is_sqlite:
                    connection.info[_NOW] = (await connection.execute(_LOCK[lane])).one().now
                try:
                    yield connection
                finally:
                    if not connection.invalidated:  # by a call that was cancelled
                        connection.info.pop(_NOW, None)  # it would outlive the transaction

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A consistent snapshot to read from."""
        async with self.engine.connect() as connection:
            if not self.is_sqlite:
                connection = await connection.execution_options(isolation_level="REPEATABLE READ")
            async with connection.begin():
                yield connection

    async def check(self) -> None:
        """Connect once. Raises UserError, without the password, if the database can't be reached or opened."""
        try:
            async with self.engine.connect():
                pass
        except (DBAPIError, OSError, TimeoutError) as error:
            raise self.unusable(error) from None

    def unusable(self, error: BaseException) -> UserError:
        """What to tell the user whose database fails like this."""
        reason = (str(getattr(error, "orig", None) or error) or type(error).__name__).splitlines()[0]
        return UserError(f"cannot use the database {self.engine.url.render_as_string()}: {reason}")

    async def close(self) -> None:
        await self.engine.dispose()


def _lock(lane: Lane) -> Select[Any]:
    """The statement that waits for a lane, and says what time it is then; its locks are taken from left to right and end with
    the transaction."""
    if lane.value is None:
        return select(func.pg_advisory_xact_lock(_WRITERS), _CLOCK.label("now"))
    own = (func.pg_advisory_xact_lock(key) for key in lane.value)
    return select(func.pg_advisory_xact_lock_shared(_WRITERS), *own, _CLOCK.label("now"))


_CLOCK = func.extract("epoch", func.clock_timestamp())
_LOCK = {lane: _lock(lane) for lane in Lane}


def among(connection: AsyncConnection, column: ColumnElement[V], values: Sequence[V]) -> ColumnElement[bool]:
    """`column` is one of these. One parameter on PostgreSQL, however many there are: to spell out hundreds of them costs
    more than to look them up."""
    if connection.dialect.name == "sqlite":
        return column.in_(values)
    return is_any_of(column, literal(list(values), ARRAY(unbounded(column.type))))


def is_any_of(column: ColumnElement[V], array: ColumnElement[Sequence[V]]) -> ColumnElement[bool]:
    """`column` is one of an array's values: PostgreSQL's."""
    return column == any_(array)


def unbounded(kind: TypeEngine[Any]) -> TypeEngine[Any]:
    """Without a text's length: PostgreSQL would cut what is longer, silently, and find or store what was not meant."""
    return String() if isinstance(kind, String) else kind


async def now(connection: AsyncConnection) -> float:
    """Unix time in seconds by the database's clock: the only clock that deadlines go by.

    The first that asks in a write transaction hears when it got its lane; the next asks anew.
    """
    if connection.dialect.name == "sqlite":
        expression: Any = literal_column("(julianday('now') - 2440587.5) * 86400.0", Float)
    elif (known := connection.info.pop(_NOW, None)) is not None:
        return float(known)
    else:
        expression = _CLOCK
    return float((await connection.execute(select(expression))).scalar_one())


def _ping_idle(engine: AsyncEngine) -> None:
    """Ask a connection that has been idle whether it is still there, before it is used; a new one takes its place if not.

    SQLAlchemy's own `pool_pre_ping` asks each time, which is a round trip more for every transaction.
    """

    @event.listens_for(engine.sync_engine, "connect")
    @event.listens_for(engine.sync_engine, "checkin")
    def _used(_connection: Any, record: Any) -> None:
        record.info[_IDLE_SINCE] = time.monotonic()

    @event.listens_for(engine.sync_engine, "checkout")
    def _checkout(connection: Any, record: Any, _proxy: Any) -> None:
        if time.monotonic() - record.info[_IDLE_SINCE] < _SURELY_THERE_S:
            return
        try:
            engine.sync_engine.dialect.do_ping(connection)
        except Exception as error:
            raise InvalidatePoolError from error  # all others are of the same server


class _WholeCalls(aiosqlite.Connection):
    """Whoever is cancelled in the middle of a call waits for its end: the call goes on in its thread in any case, and what it
    began, a transaction with the database's lock, would be left to nobody."""

    async def _execute(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        call = asyncio.ensure_future(super()._execute(fn, *args, **kwargs))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            while not call.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([call])
            if not call.cancelled():
                call.exception()  # nobody else will ask
            raise

    async def close(self) -> None:
        """Roll back first: SQLite keeps what is closed open, with its lock, as long as anything refers to a cursor of it, and
        the error of a call that was cancelled does."""
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error, ValueError):
                await self._execute(self._connection.rollback)
        await super().close()


def _connect_sqlite(database: str, **options: Any) -> aiosqlite.Connection:
    connection = _WholeCalls(lambda: sqlite3.connect(database, **options), 64)
    connection._thread.daemon = True  # as SQLAlchemy does: a process ends without it
    return connection


def _prepare_sqlite(engine: AsyncEngine) -> None:
    """WAL, foreign keys, and transactions that take the write lock when they begin, not at their first write.

    A transaction that reads first and writes later would otherwise fail with "database is locked" whatever the timeout.
    """

    @event.listens_for(engine.sync_engine, "connect")
    def _connect(dbapi_connection: Any, _record: Any) -> None:
        dbapi_connection.isolation_level = None
        cursor = dbapi_connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={int(_BUSY_TIMEOUT_S * 1000)}")
        _use_wal(cursor)
        cursor.execute("PRAGMA synchronous=FULL")  # a receipt promises that the rollout survives a crash
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def _begin(connection: Any) -> None:
        write = connection.get_execution_options().get("rollswarm_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def _use_wal(cursor: Any) -> None:
    """Switch a new database to WAL, which the file then remembers.

    Two processes that open a new file at the same moment collide here, and the busy timeout does not cover the switch.
    """
    deadline = time.monotonic() + _WAL_PATIENCE_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except Exception as error:
            if "locked" not in str(error) or time.monotonic() >= deadline:
                raise
        time.sleep(_WAL_RETRY_S)
