"""What the dashboard's tests have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from coordinator.dashboard.access import Access
from coordinator.dashboard.settings import Settings
from coordinator.dashboard.views import Views
from coordinator.metrics import Metrics
from coordinator.operate import make_token
from coordinator.operators import Role
from protocol.statement import sign_statement
from protocol.terms import RunTerms
from tests.factories import COORDINATOR, SECRET, make_terms
from tests.stored_run import SCHEDULING, StoredRun

Client = TestClient[Any, Any]


def settings_of(run: StoredRun | None = None) -> Settings:
    """Tokens are read as letters, statements are signed by the test run's coordinator."""
    return Settings(
        SCHEDULING if run is None else run.scheduling,
        audit_fraction=1.0,
        decode=lambda token_ids: "".join(chr(32 + token % 94) for token in token_ids),
        sign=partial(sign_statement, signer=COORDINATOR),
    )


def views_of(run: StoredRun, name: str = "test") -> Views:
    """The dashboard of a run."""

    async def read_terms() -> RunTerms:
        return make_terms(name=name)

    access = Access(run.db, SECRET, encrypted=False)
    return Views(run.db, Metrics(), read_terms, access=access, settings=settings_of(run))


@asynccontextmanager
async def serving(run: StoredRun, name: str = "test") -> AsyncIterator[Client]:
    """A browser before the dashboard of a run."""
    async with TestClient(TestServer(views_of(run, name).application())) as client:
        yield client


async def token_of(run: StoredRun, role: Role, name: str = "") -> str:
    """A new token; the audit log calls its owner "a ROLE" if nothing else is said."""
    url = run.db.engine.url.render_as_string(hide_password=False)
    return await make_token(url, name or f"a {role.name}", role, None)


async def bearer(run: StoredRun, role: Role, name: str = "") -> dict[str, str]:
    """The header by which a command shows who it is."""
    return {"Authorization": f"Bearer {await token_of(run, role, name)}"}
