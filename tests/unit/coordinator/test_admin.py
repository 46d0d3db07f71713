"""The admin door over HTTP: who may do what, and what a forged form or a leaked log gives."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestClient, TestServer

from coordinator.admin_client import act
from coordinator.dashboard.access import COOKIE, Access
from coordinator.dashboard.views import Views
from coordinator.metrics import Metrics
from coordinator.operate import make_token, revoke_token
from coordinator.operators import Role
from coordinator.store import knobs as knob_store
from coordinator.store import run as run_store
from coordinator.store import tables as t
from protocol.errors import UserError
from protocol.signing import Identity
from protocol.terms import RunTerms
from tests.dashboard import settings_of
from tests.factories import SECRET, make_terms
from tests.stored_run import StoredRun

Client = TestClient[Any, Any]
PAGES = ("/run", "/workers", "/workers/x", "/rollouts", "/rollouts/x", "/ledger", "/audit")


async def read_terms() -> RunTerms:
    return make_terms()


@pytest_asyncio.fixture
async def client(run: StoredRun) -> AsyncIterator[Client]:
    access = Access(run.db, SECRET, encrypted=False)
    views = Views(run.db, Metrics(), read_terms, access=access, settings=settings_of(run))
    async with TestClient(TestServer(views.application())) as client:
        yield client


async def token(run: StoredRun, role: Role) -> str:
    return await make_token(run.db.engine.url.render_as_string(hide_password=False), f"a {role.name}", role, None)


async def log_in(client: Client, run: StoredRun, role: Role) -> str:
    """The form value of a new session."""
    answer = await client.post("/login", data={"token": await token(run, role)}, allow_redirects=False)
    assert answer.status == 303
    page = await (await client.get("/run")).text()
    found = re.search(r'name="csrf" value="(\w+)"', page)
    assert found is not None
    return found[1]


async def actions(run: StoredRun) -> list[tuple[str, str, str]]:
    return [(row.actor, row.action, row.subject) for row in await run.rows(t.events) if row.actor.startswith("a ")]


async def test_strangers_see_the_overview_and_nothing_else(client: Client) -> None:
    assert (await client.get("/")).status == 200
    for page in PAGES:
        answer = await client.get(page, allow_redirects=False)
        assert (answer.status, answer.headers.get("Location")) == (303, "/login"), page
    for action in ("pause", "ban", "set", "nonsense"):
        assert (await client.post(f"/api/v1/admin/{action}", json={})).status == 401
    assert (await client.post("/run", data={"action": "pause", "confirmed": "yes"})).status == 401


async def test_a_wrong_token_opens_nothing(client: Client) -> None:
    answer = await client.post("/login", data={"token": "operator-guess"})
    assert answer.status == 401 and COOKIE not in answer.cookies


async def test_an_operator_pauses_drains_and_resumes_by_form(client: Client, run: StoredRun) -> None:
    csrf = await log_in(client, run, Role.OPERATOR)
    asked = await (await client.post("/run", data={"csrf": csrf, "action": "pause"})).text()
    assert "Really pause" in asked and not (await run_store.load(run.db)).paused  # type: ignore[union-attr]
    for action, paused, draining in (("pause", True, 0.0), ("drain", False, 1.0), ("resume", False, 0.0)):
        fields = {"csrf": csrf, "action": action, "confirmed": "yes"}
        assert (await client.post("/run", data=fields)).status == 200
        now = await run_store.load(run.db)
        assert now is not None and now.paused is paused
        async with run.db.read() as connection:
            assert (await knob_store.read(connection))["draining"] == draining
    assert await actions(run) == [("a OPERATOR", action, "run") for action in ("pause", "drain", "resume")]


async def test_a_form_of_another_site_is_refused(client: Client, run: StoredRun) -> None:
    await log_in(client, run, Role.ADMIN)
    for fields in ({}, {"csrf": "0" * 64}, {"csrf": "ü"}):
        answer = await client.post("/run", data={"action": "pause", "confirmed": "yes", **fields})
        assert answer.status == 403
    assert (await client.post("/api/v1/admin/pause", json={})).status == 403, "no session for the API"
    assert (await client.post("/logout", data={})).status == 403
    assert await actions(run) == []


async def test_a_viewer_looks_and_changes_nothing(client: Client, run: StoredRun, alice: Identity) -> None:
    csrf = await log_in(client, run, Role.VIEWER)
    page = await (await client.get("/run")).text()
    assert "<button>Ban" not in page and "<button>Set" not in page
    every = {"worker": alice.key_id, "name": "audit_fraction", "value": "0.5", "confirmed": "yes"}
    for action in ("pause", "drain", "resume", "ban", "pardon", "set", "nonsense", ""):
        assert (await client.post("/run", data={"csrf": csrf, "action": action, **every})).status == 403, action
    assert await actions(run) == []


async def test_settings_are_an_admins(client: Client, run: StoredRun) -> None:
    csrf = await log_in(client, run, Role.OPERATOR)
    fields = {"csrf": csrf, "action": "set", "name": "audit_fraction", "value": "0.5", "confirmed": "yes"}
    assert (await client.post("/run", data=fields)).status == 403
    fields["csrf"] = await log_in(client, run, Role.ADMIN)
    page = await (await client.post("/run", data=fields)).text()
    assert "audit_fraction is 0.5" in page and "changed here" in page
    fields["value"] = "2"
    refused = await client.post("/run", data=fields)
    assert refused.status == 409 and "from 0.01 to 1" in await refused.text()
    assert await actions(run) == [("a ADMIN", "set", "audit_fraction")]


async def test_a_worker_is_banned_by_a_command_and_pardoned(
    client: Client, run: StoredRun, alice: Identity, tmp_path: Path
) -> None:
    url, secret = str(client.make_url("/")), await token(run, Role.OPERATOR)
    assert "is banned" in await act(url, secret, None, "ban", {"worker": alice.key_id, "reason": "spam"})
    assert (await run.standing(alice)).ban_reason == "spam"
    assert "is pardoned" in await act(url, secret, None, "pardon", {"worker": alice.key_id})
    assert not (await run.standing(alice)).banned
    with pytest.raises(UserError, match="no worker has"):
        await act(url, secret, None, "ban", {"worker": "ffff"})
    with pytest.raises(UserError, match=r"403.*needs admin"):
        await act(url, secret, None, "set", {"name": "worker_share", "value": "0.5"})


async def test_a_revoked_token_ends_its_sessions(client: Client, run: StoredRun) -> None:
    await log_in(client, run, Role.VIEWER)
    await revoke_token(run.db.engine.url.render_as_string(hide_password=False), "a VIEWER")
    assert (await client.get("/run", allow_redirects=False)).status == 303


async def test_logging_out_ends_the_session_here(client: Client, run: StoredRun) -> None:
    csrf = await log_in(client, run, Role.VIEWER)
    await client.post("/logout", data={"csrf": csrf})
    assert (await client.get("/run", allow_redirects=False)).status == 303


async def test_cookies_and_pages_are_closed_to_scripts_and_other_sites(client: Client, run: StoredRun) -> None:
    answer = await client.post("/login", data={"token": await token(run, Role.VIEWER)}, allow_redirects=False)
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    policy = (await client.get("/run")).headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in policy and "unsafe" not in policy


async def test_secrets_are_neither_stored_nor_logged(
    client: Client, run: StoredRun, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = await token(run, Role.ADMIN)
    await client.post("/login", data={"token": secret})
    await client.post("/api/v1/admin/nonsense", headers={"Authorization": f"Bearer {secret}"}, data="{" * 10)
    await client.post("/api/v1/admin/pause", headers={"Authorization": f"Bearer {secret}x"})
    assert secret not in caplog.text
    for table in t.metadata.sorted_tables:
        assert secret not in repr(await run.rows(table)), table.name


async def test_rubbish_gets_no_internal_error(client: Client, run: StoredRun) -> None:
    secret = await token(run, Role.ADMIN)
    headers = {"Authorization": f"Bearer {secret}"}
    for body in (
        "",
        "[]",
        "{" * 5000,
        "[" * 30000,
        '{"worker": {"a": 1}}',
        '{"worker": "\\u0000"}',
        "\ud800".encode("utf-8", "replace"),
    ):
        for action in ("ban", "set", "nonsense"):
            assert (await client.post(f"/api/v1/admin/{action}", data=body, headers=headers)).status == 400
    for cookie in ("a", "a.b.c", "..", "ü", "a." + "9" * 150 + ".c"):
        answer = await client.get("/run", headers={"Cookie": f"{COOKIE}={cookie}"}, allow_redirects=False)
        assert answer.status in (303, 400)
