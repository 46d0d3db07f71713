"""Databases: every test that asks for `database_url` runs on SQLite and on a real PostgreSQL."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.postgres import Postgres, find_binaries


@pytest.fixture(scope="session")
def postgres_binaries() -> Path:
    """Where PostgreSQL is. Missing binaries fail in CI and skip on a laptop."""
    binaries = find_binaries()
    if binaries is None:
        assert not os.environ.get("CI"), "CI must run the tests on PostgreSQL: install it"
        pytest.skip("no PostgreSQL here: install it to run these tests on it as well")
    return binaries


@pytest.fixture(scope="session")
def postgres(postgres_binaries: Path) -> Iterator[Postgres]:
    """A server for the session, started when the first test asks."""
    server = Postgres(postgres_binaries)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with the schema, to be copied."""
    from coordinator.migrate import upgrade

    path = tmp_path_factory.mktemp("schema") / "run.db"
    asyncio.run(upgrade(f"sqlite+aiosqlite:///{path}"))
    return path


@pytest.fixture(scope="session")
def migrated_postgres(postgres: Postgres) -> str:
    """URL of a database with the schema. One for all tests: to empty it is much faster than to make another."""
    from coordinator.migrate import upgrade

    url = postgres.create("migrated")
    asyncio.run(upgrade(url))
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a database without any table."""
    if request.param == "sqlite":
        yield f"sqlite+aiosqlite:///{tmp_path / 'run.db'}"
        return
    server = request.getfixturevalue("postgres")
    yield server.create("empty")
    server.drop("empty")


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a database with the current schema and no rows."""
    if request.param == "sqlite":
        path = tmp_path / "run.db"
        shutil.copyfile(request.getfixturevalue("migrated_sqlite"), path)
        yield f"sqlite+aiosqlite:///{path}"
        return
    url = request.getfixturevalue("migrated_postgres")
    asyncio.run(_delete_all_rows(url))
    yield url


@pytest.fixture
def sqlite_url(migrated_sqlite: Path, tmp_path: Path) -> str:
    """For tests of what does not depend on the database: SQLite alone."""
    shutil.copyfile(migrated_sqlite, tmp_path / "run.db")
    return f"sqlite+aiosqlite:///{tmp_path / 'run.db'}"


async def _delete_all_rows(url: str) -> None:
    from coordinator.store.database import Database
    from coordinator.store.tables import metadata

    db = Database.open(url)
    async with db.write() as connection:
        for table in reversed(metadata.sorted_tables):
            await connection.execute(table.delete())
    await db.close()
