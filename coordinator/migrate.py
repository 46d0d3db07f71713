"""Brings a database to the current schema with Alembic; safe to call from several processes at once: writers take turns."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy.engine import Connection
from sqlalchemy.exc import OperationalError

from coordinator.store.database import Database

_MIGRATIONS = Path(__file__).parent / "migrations"


async def upgrade(url: str, revision: str = "head") -> None:
    """Migrate up. Raises UserError if the database can't be reached or written."""
    await _migrate(url, lambda config: command.upgrade(config, revision))


async def downgrade(url: str, revision: str) -> None:
    """Migrate down to `revision` ("base" for an empty database)."""
    await _migrate(url, lambda config: command.downgrade(config, revision))


def _is_news(record: logging.LogRecord) -> bool:
    """False for what Alembic says at every start of the kind of database that it found."""
    return str(record.msg).startswith("Running")


async def _migrate(url: str, step: Callable[[Config], None]) -> None:
    db = Database.open(url)

    logging.getLogger("alembic.runtime.migration").addFilter(_is_news)

    def run(connection: Connection) -> None:
        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
        config.attributes["connection"] = connection
        step(config)

    try:
        await db.check()
        async with db.write() as connection:
            await connection.run_sync(run)
    except OperationalError as error:  # a full disk, a file that is read-only
        raise db.unusable(error) from None
    finally:
        await db.close()
