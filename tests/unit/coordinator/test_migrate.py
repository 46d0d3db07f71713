from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, inspect, text

from coordinator.migrate import downgrade, upgrade
from coordinator.store.database import Database
from coordinator.store.tables import metadata
from protocol.errors import UserError


async def look(url: str, at: Any) -> Any:
    db = Database.open(url)
    try:
        async with db.read() as connection:
            return await connection.run_sync(at)
    finally:
        await db.close()


def differences(connection: Connection) -> list[Any]:
    options = {"compare_type": True, "compare_server_default": True}
    return list(compare_metadata(MigrationContext.configure(connection, opts=options), metadata))


def tables(connection: Connection) -> set[str]:
    return set(inspect(connection).get_table_names()) - {"alembic_version"}


def unique_live_lease(connection: Connection) -> list[dict[str, Any]]:
    return [index for index in inspect(connection).get_indexes("leases") if index["name"] == "uq_leases_live_sample"]


async def test_migrations_make_the_schema_of_the_code(empty_database_url: str) -> None:
    await upgrade(empty_database_url)
    assert await look(empty_database_url, tables) == set(metadata.tables)
    assert await look(empty_database_url, differences) == []
    (index,) = await look(empty_database_url, unique_live_lease)
    assert index["unique"]
    await upgrade(empty_database_url)
    await downgrade(empty_database_url, "base")
    assert await look(empty_database_url, tables) == set()


async def test_a_start_without_anything_to_change_is_no_news(
    empty_database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="alembic.runtime.migration")
    await upgrade(empty_database_url)
    assert {record.getMessage()[:15] for record in caplog.records} == {"Running upgrade"}
    caplog.clear()
    await upgrade(empty_database_url)
    assert caplog.records == []


async def test_the_newest_of_each_is_found_by_an_index_that_goes_back_as_it_came(empty_database_url: str) -> None:
    added = {"rollouts": "ix_rollouts_received", "verdicts": "ix_verdicts_verified"}

    def there(connection: Connection) -> set[str | None]:
        return {index["name"] for table in added for index in inspect(connection).get_indexes(table)}

    await upgrade(empty_database_url)
    assert await look(empty_database_url, there) >= set(added.values())
    await downgrade(empty_database_url, "0005")
    assert not await look(empty_database_url, there) & set(added.values())
    await upgrade(empty_database_url)
    assert await look(empty_database_url, there) >= set(added.values())


async def test_how_postgres_keeps_what_is_large_goes_back_as_it_came(empty_database_url: str) -> None:
    def kept(connection: Connection) -> set[tuple[Any, ...]]:
        if connection.dialect.name != "postgresql":
            return set()
        return {
            tuple(row)
            for row in connection.execute(
                text(
                    "SELECT c.relname, array_to_string(c.reloptions, ','), a.attname, a.attstorage FROM pg_class c"
                    " JOIN pg_attribute a ON a.attrelid = c.oid WHERE c.relname IN ('payloads', 'verdicts') AND a.attnum > 0"
                )
            )
        }

    await upgrade(empty_database_url, "0006")
    before = await look(empty_database_url, kept)
    await upgrade(empty_database_url)
    after = await look(empty_database_url, kept)
    postgres = empty_database_url.startswith("postgresql")
    assert (("payloads", "toast_tuple_target=4080", "payload", b"e") in after) == postgres
    await downgrade(empty_database_url, "0006")
    assert await look(empty_database_url, kept) == before


async def test_replicas_may_migrate_at_once(empty_database_url: str) -> None:
    await asyncio.gather(*(upgrade(empty_database_url) for _ in range(3)))
    assert await look(empty_database_url, tables) == set(metadata.tables)


@pytest.mark.parametrize(
    "url",
    [
        "sqlite+aiosqlite:////proc/run.db",
        "postgresql+asyncpg://user:secret@127.0.0.1:1/name",
        "postgresql+asyncpg://user@/name?host=/nonexistent",
    ],
)
async def test_a_database_that_cannot_be_used_is_said_without_the_password(url: str) -> None:
    with pytest.raises(UserError, match="cannot use the database") as caught:
        await upgrade(url)
    assert "secret" not in str(caught.value)


async def test_an_absent_postgres_database_is_the_users_mistake(postgres: Any) -> None:
    with pytest.raises(UserError, match="does not exist"):
        await upgrade(postgres.url("absent"))
