from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.operate import set_paused, set_standing
from coordinator.store import run as run_store
from coordinator.store import tables as t
from protocol.errors import UserError
from protocol.signing import KEY_ID_PREFIX, Identity, short_id
from tests.stored_run import StoredRun


def url_of(run: StoredRun) -> str:
    return run.db.engine.url.render_as_string(hide_password=False)


async def actions(run: StoredRun) -> list[tuple[str, str]]:
    return [(row.actor, row.action) for row in await run.rows(t.events) if row.actor == "operator"]


async def test_an_operator_bans_by_the_first_digits(run: StoredRun, alice: Identity) -> None:
    await run.work(alice, 1)
    await run.lease(alice, 1)
    assert await set_standing(url_of(run), short_id(alice.key_id), "spam", banned=True) == alice.key_id
    standing = await run.standing(alice)
    assert (standing.banned, standing.ban_reason) == (True, "spam")
    assert await run.rows(t.leases, t.leases.c.state == "live") == []
    assert (await run.drops())["banned"] == (1, 6)
    assert await actions(run) == [("operator", "ban")]


async def test_a_pardon_lifts_the_ban_and_leaves_the_credits(run: StoredRun, alice: Identity) -> None:
    await run.work(alice, 1)
    await run.judge()
    await set_standing(url_of(run), alice.key_id, "spam", banned=True)
    await set_standing(url_of(run), alice.key_id, "a mistake", banned=False)
    standing = await run.standing(alice)
    assert (standing.banned, standing.strikes, standing.credits) == (False, 0, 6)
    assert await run.lease(alice)
    assert await actions(run) == [("operator", "ban"), ("operator", "pardon")]


@pytest.mark.parametrize("worker", ["", "zz", "%", "_", KEY_ID_PREFIX])
async def test_digits_must_name_one_worker(run: StoredRun, alice: Identity, worker: str) -> None:
    with pytest.raises(UserError, match="digits of"):
        await set_standing(url_of(run), worker, "spam", banned=True)
    assert not (await run.standing(alice)).banned


async def test_pausing_and_resuming_are_kept_and_recorded(run: StoredRun) -> None:
    for paused in (True, False):
        await set_paused(url_of(run), paused)
        current = await run_store.load(run.db)
        assert current is not None and current.paused is paused
    assert await actions(run) == [("operator", "pause"), ("operator", "resume")]


async def test_a_run_that_was_never_served_is_said(empty_database_url: str) -> None:
    with pytest.raises(UserError, match="served once"):
        await set_paused(empty_database_url, True)


async def test_a_schema_without_a_run_is_said(database_url: str) -> None:
    with pytest.raises(UserError, match="no run yet"):
        await set_paused(database_url, True)


async def test_an_unreachable_database_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot use the database"):
        await set_paused(f"sqlite+aiosqlite:///{tmp_path}", True)
