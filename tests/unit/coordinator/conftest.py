"""A run to test on. `begin` makes one with other numbers; every database is closed at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from protocol.signing import Identity
from tests.factories import make_identity
from tests.stored_run import StoredRun

ALICE: Identity = make_identity(11)
BOB: Identity = make_identity(12)


@pytest_asyncio.fixture
async def begin(database_url: str) -> AsyncIterator[Callable[..., Awaitable[StoredRun]]]:
    """Begin a run on either database, with the workers Alice and Bob."""
    begun: list[StoredRun] = []

    async def _begin(**changes: Any) -> StoredRun:
        run = await StoredRun.begin(database_url, **changes)
        begun.append(run)
        await run.join(ALICE, BOB)
        return run

    yield _begin
    for run in begun:
        await run.db.close()


@pytest_asyncio.fixture
async def run(begin: Callable[..., Awaitable[StoredRun]]) -> StoredRun:
    """The run with the default numbers: groups of two, two groups a batch, staleness 1."""
    return await begin()


@pytest.fixture
def alice() -> Identity:
    return ALICE


@pytest.fixture
def bob() -> Identity:
    return BOB
