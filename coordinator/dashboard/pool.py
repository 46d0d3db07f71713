"""Connections of the pages' own: however many people look, those that serve workers and trainer are left alone."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import create_async_engine

from coordinator.store.database import Database

_CONNECTIONS = 4
_PATIENCE_S = 5.0  # who gets no connection in this time is told to come back


def beside(db: Database) -> Database:
    """A small pool on the same database; on SQLite, whose connections cost nothing elsewhere, one of the usual size."""
    url = db.engine.url
    if db.is_sqlite:
        return Database.open(url.render_as_string(hide_password=False))
    return Database(
        create_async_engine(url, pool_size=_CONNECTIONS, max_overflow=0, pool_timeout=_PATIENCE_S, pool_pre_ping=True)
    )
