"""What the dashboard's tests have in common."""

from __future__ import annotations

from functools import partial

from coordinator.dashboard.views import Settings
from protocol.statement import sign_statement
from tests.factories import COORDINATOR
from tests.stored_run import SCHEDULING, StoredRun


def settings_of(run: StoredRun | None = None) -> Settings:
    """Tokens are read as letters, statements are signed by the test run's coordinator."""
    return Settings(
        SCHEDULING if run is None else run.scheduling,
        audit_fraction=1.0,
        decode=lambda token_ids: "".join(chr(32 + token % 94) for token in token_ids),
        sign=partial(sign_statement, signer=COORDINATOR),
    )
