"""A connection that has been idle is asked whether it is still there; one in use is not, which saves a round trip."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from coordinator.store import database
from coordinator.store.database import Database
from demo.postgres import Postgres


@pytest.fixture
def server(postgres_binaries: Path) -> Iterator[Postgres]:
    """One that may be restarted: the other tests' own goes on."""
    own = Postgres(postgres_binaries)
    yield own
    own.stop()


@pytest_asyncio.fixture
async def db(server: Postgres) -> AsyncIterator[Database]:
    opened = Database.open(server.url("postgres"))
    yield opened
    await opened.close()


async def _backend(db: Database) -> int:
    """The process of the server that answers."""
    async with db.read() as connection:
        return int((await connection.execute(text("SELECT pg_backend_pid()"))).scalar_one())


async def _end_others(server: Postgres, pid: int) -> None:
    other = Database.open(server.url("postgres"))
    async with other.read() as connection:
        await connection.execute(text(f"SELECT pg_terminate_backend({pid}, 5000)"))
    await other.close()


async def test_one_that_was_lost_while_idle_is_replaced(
    db: Database, server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_SURELY_THERE_S", 0.0)
    first = await _backend(db)
    await _end_others(server, first)
    assert await _backend(db) != first


async def test_one_in_use_is_not_asked_and_what_is_lost_then_is_an_error(
    db: Database, server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it would be had it been lost a moment later: callers try again. The others of the pool go with it."""
    monkeypatch.setattr(database, "_SURELY_THERE_S", 600.0)
    first = await _backend(db)
    assert await _backend(db) == first
    await _end_others(server, first)
    with pytest.raises(DBAPIError):
        await _backend(db)
    assert await _backend(db) != first
