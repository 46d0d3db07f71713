"""The admin door over HTTP: who may do what, and what a forged form or a leaked log gives."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from coordinator import actions as acts
from coordinator.admin_client import act
from coordinator.dashboard.access import COOKIE
from coordinator.joining import hash_token
from coordinator.operate import revoke_token
from coordinator.operators import Role
from coordinator.store import knobs as knob_store
from coordinator.store import run as run_store
from coordinator.store import tables as t
from protocol.errors import UserError
from protocol.signing import Identity
from tests.dashboard import Client, serving, token_of
from tests.stored_run import StoredRun

PAGES = ("/run", "/workers", "/workers/x", "/rollouts", "/rollouts/x", "/ledger", "/audit")


@pytest_asyncio.fixture
async def client(run: StoredRun) -> AsyncIterator[Client]:
    async with serving(run) as client:
        yield client


async def log_in(client: Client, run: StoredRun, role: Role) -> str:
    """The form value of a new session."""
    answer = await client.post("/login", data={"token": await token_of(run, role)}, allow_redirects=False)
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
    for action in acts.ACTIONS:
        assert (await client.post(f"/api/v1/admin/{action}", json={})).status == 401
    assert (await client.post("/api/v1/admin/nonsense", json={})).status == 404
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
    every = {"worker": alice.key_id, "name": "audit_fraction", "value": "0.5", "hardware": "h", "confirmed": "yes"}
    for action in (*acts.ACTIONS, "nonsense", ""):
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
    url, secret = str(client.make_url("/")), await token_of(run, Role.OPERATOR)
    assert "is banned" in await act(url, secret, None, "ban", {"worker": alice.key_id, "reason": "spam"})
    assert (await run.standing(alice)).ban_reason == "spam"
    assert "is pardoned" in await act(url, secret, None, "pardon", {"worker": alice.key_id})
    assert not (await run.standing(alice)).banned
    with pytest.raises(UserError, match="no worker has"):
        await act(url, secret, None, "ban", {"worker": "ffff"})
    with pytest.raises(UserError, match=r"^refused \(403\): a OPERATOR is operator; this needs admin$"):
        await act(url, secret, None, "set", {"name": "worker_share", "value": "0.5"})


async def test_hardware_is_decided_about_and_invitations_are_made(client: Client, run: StoredRun) -> None:
    url, secret = str(client.make_url("/")), await token_of(run, Role.OPERATOR)
    assert await act(url, secret, None, "refuse", {"hardware": "an old card"}) == "an old card is refused"
    done = await act(url, secret, None, "invite", {"uses": "3", "days": "0.5", "note": "friends"})
    invite = await run.row(t.invites)
    assert (invite.token_hash, invite.uses_left) == (hash_token(done.rpartition(" ")[2]), 3)
    for wrong in ({"uses": "0.5"}, {"uses": "0"}, {"days": "-1"}, {"days": "nan"}, {"uses": "1e300"}, {"keys": "1"}):
        with pytest.raises(UserError, match="400"):
            await act(url, secret, None, "invite", wrong)
    csrf = await log_in(client, run, Role.ADMIN)
    page = await (await client.get("/run")).text()
    assert 'aria-label="Admit an old card"' in page
    fields = {"csrf": csrf, "action": "admit", "hardware": "an old card", "confirmed": "yes"}
    assert "an old card is admitted" in await (await client.post("/run", data=fields)).text()
    assert (await run.row(t.hardware)).decision == "admitted"
    for table in t.metadata.sorted_tables:
        assert done.rpartition(" ")[2] not in repr(await run.rows(table)), "an invitation is stored as a hash alone"


async def test_a_revoked_token_ends_its_sessions(client: Client, run: StoredRun) -> None:
    await log_in(client, run, Role.VIEWER)
    await revoke_token(run.db.engine.url.render_as_string(hide_password=False), "a VIEWER")
    assert (await client.get("/run", allow_redirects=False)).status == 303


async def test_logging_out_ends_the_session_here(client: Client, run: StoredRun) -> None:
    csrf = await log_in(client, run, Role.VIEWER)
    await client.post("/logout", data={"csrf": csrf})
    assert (await client.get("/run", allow_redirects=False)).status == 303


async def test_cookies_and_pages_are_closed_to_scripts_and_other_sites(client: Client, run: StoredRun) -> None:
    answer = await client.post("/login", data={"token": await token_of(run, Role.VIEWER)}, allow_redirects=False)
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    policy = (await client.get("/run")).headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in policy and "unsafe" not in policy


async def test_secrets_are_neither_stored_nor_logged(
    client: Client, run: StoredRun, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = await token_of(run, Role.ADMIN)
    await client.post("/login", data={"token": secret})
    await client.post("/api/v1/admin/nonsense", headers={"Authorization": f"Bearer {secret}"}, data="{" * 10)
    await client.post("/api/v1/admin/pause", headers={"Authorization": f"Bearer {secret}x"})
    assert secret not in caplog.text
    for table in t.metadata.sorted_tables:
        assert secret not in repr(await run.rows(table)), table.name


async def test_rubbish_gets_no_internal_error(client: Client, run: StoredRun) -> None:
    secret = await token_of(run, Role.ADMIN)
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
        for action in ("ban", "set", "admit"):
            assert (await client.post(f"/api/v1/admin/{action}", data=body, headers=headers)).status == 400
    for cookie in ("a", "a.b.c", "..", "ü", "a." + "9" * 150 + ".c"):
        answer = await client.get("/run", headers={"Cookie": f"{COOKIE}={cookie}"}, allow_redirects=False)
        assert answer.status in (303, 400)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_is_broken_is_its_senders_mistake(client: Client, run: StoredRun, encoding: str) -> None:
    secret = await token_of(run, Role.ADMIN)
    headers = {"Content-Encoding": encoding, "Authorization": f"Bearer {secret}"}
    for path in ("/login", "/api/v1/admin/ban"):
        answer = await client.post(path, data=b"this was never compressed", headers=headers)
        assert answer.status == 400 and "broken" in await answer.text(), path


@pytest.mark.parametrize(
    "content_type",
    [
        "text/plain; charset=utf-99",
        "multipart/form-data; boundary=t",
        "application/x-www-form-urlencoded; charset=utf-16",
    ],
)
async def test_what_a_form_says_of_itself_is_not_believed(client: Client, content_type: str) -> None:
    for body, status in ((b"token=\xff%FF%ED%A0%80", 401), (b"&".join(b"a=%d" % n for n in range(99)), 400)):
        answer = await client.post("/login", data=body, headers={"Content-Type": content_type})
        assert answer.status == status


async def test_a_header_that_is_no_text_names_nobody(client: Client) -> None:
    reader, writer = await asyncio.open_connection(client.host, client.port)
    odd = (
        b"Host: a\r\nAuthorization: Bearer \xff\xfe\r\nCookie: rollswarm_session=\xff.\xfe\r\nConnection: close\r\n\r\n"
    )
    writer.write(b"GET /api/v1/workers HTTP/1.1\r\n" + odd)
    assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
    writer.close()
    await writer.wait_closed()
