"""A file made from a run's database: in place only when whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from coordinator.operate import opened
from coordinator.store.database import Database
from protocol.errors import UserError


@asynccontextmanager
async def exporting(url: str, out: Path) -> AsyncIterator[tuple[Database, Path]]:
    """The database, and the path to write to: it takes `out`'s place at the end, and is gone if anything failed.

    Raises UserError if the database can't be used or holds no run, or the file can't be written.
    """
    scratch = out.with_name(out.name + ".part")
    try:
        async with opened(url) as db:
            yield db, scratch
        scratch.replace(out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from None
    finally:
        scratch.unlink(missing_ok=True)
