"""One statement for many rows: the same on both databases, whatever the columns hold."""

from __future__ import annotations

import contextlib

import pytest
from sqlalchemy import BigInteger, bindparam, func, select, update
from sqlalchemy.exc import DBAPIError, IntegrityError

from coordinator.store import many
from coordinator.store import tables as t
from protocol.signing import Identity
from tests.stored_run import StoredRun


def _evidence(worker: Identity, test: str, **values: object) -> dict[str, object]:
    usual = {"bets": [], "log_e": 0.0, "rollouts": 0, "tokens": 0, "updated_at": 0.0, "alarmed_at": None}
    return {"worker_id": worker.key_id, "test": test} | usual | values


async def test_what_is_inserted_is_what_was_given(run: StoredRun, alice: Identity, bob: Identity) -> None:
    rows = [
        _evidence(alice, "one", bets=[0.5, -1.25], log_e=1e-300, rollouts=2**62),
        _evidence(alice, "two", bets=[], alarmed_at=12.5),
        _evidence(bob, 'it\'s {one}, "two" or NULL', bets=[[1], {"a": None}]),
    ]
    async with run.db.write() as connection:
        await many.insert(connection, t.evidence, rows)
        await many.insert(connection, t.evidence, [])
    async with run.db.read() as connection:
        found = [dict(row._mapping) for row in await connection.execute(select(t.evidence))]
    key = ("worker_id", "test")
    assert sorted(found, key=lambda row: [row[name] for name in key]) == sorted(
        rows, key=lambda row: [row[name] for name in key]
    )


async def test_bytes_and_what_is_left_to_defaults(run: StoredRun) -> None:
    rows = [
        {
            "version": number,
            "manifest_digest": f"sha256:{number}",
            "payload": bytes(range(256)) * number,
            "key_id": "",
            "signature": b"",
            "announced_at": 0.0,
        }
        for number in (100, 101)
    ]
    async with run.db.write() as connection:
        await many.insert(connection, t.policy_versions, rows)
    versions = select(t.policy_versions).where(t.policy_versions.c.version >= 100).order_by("version")
    async with run.db.read() as connection:
        found = list(await connection.execute(versions))
    assert [row.payload for row in found] == [row["payload"] for row in rows]
    assert not any(row.withdrawn for row in found)


async def test_one_row_that_breaks_a_promise_leaves_none(run: StoredRun, alice: Identity) -> None:
    rows = [_evidence(alice, "one"), _evidence(alice, "two"), _evidence(alice, "one")]
    with pytest.raises(IntegrityError):
        async with run.db.write() as connection:
            await many.insert(connection, t.evidence, rows)
    async with run.db.read() as connection:
        assert (await connection.execute(select(func.count()).select_from(t.evidence))).scalar_one() == 0


async def test_what_is_too_long_is_not_cut(run: StoredRun, alice: Identity) -> None:
    # SQLite knows no length and keeps it whole, PostgreSQL refuses it.
    expected = contextlib.nullcontext() if run.db.is_sqlite else pytest.raises(DBAPIError, match="too long")
    with expected:
        async with run.db.write() as connection:
            await many.insert(connection, t.evidence, [_evidence(alice, "x" * 33)])
    async with run.db.read() as connection:
        kept = (await connection.execute(select(t.evidence))).all()
    assert [row.test for row in kept] == ["x" * 33] * run.db.is_sqlite


async def test_each_row_is_updated_by_its_own_numbers(run: StoredRun, alice: Identity, bob: Identity) -> None:
    more = many.UpdateMany(
        lambda given: (
            update(t.workers)
            .where(t.workers.c.worker_id == given("of_worker"))
            .values(credits=t.workers.c.credits + given("added"))
        ),
        of_worker=t.workers.c.worker_id.type,
        added=BigInteger(),
    )
    rows = [{"of_worker": alice.key_id, "added": 3}, {"of_worker": bob.key_id, "added": 2**40}]
    async with run.db.write() as connection:
        await more.execute(connection, rows)
        await more.execute(connection, rows[:1])
        await more.execute(connection, [{"of_worker": "nobody", "added": 1}])
        await more.execute(connection, [])
    async with run.db.read() as connection:
        credits = select(t.workers.c.worker_id, t.workers.c.credits)
        found = {row.worker_id: row.credits for row in await connection.execute(credits)}
    assert (found[alice.key_id], found[bob.key_id]) == (6, 2**40)


async def test_a_statement_made_once_is_about_the_rows_that_are_named(run: StoredRun, alice: Identity) -> None:
    async with run.db.write() as connection:
        await many.insert(
            connection, t.evidence, [_evidence(alice, name, tokens=7) for name in ("a", "b", "c", "x" * 32)]
        )
    raise_them = many.About(
        lambda mine: update(t.evidence).where(mine).values(tokens=t.evidence.c.tokens + bindparam("more")),
        t.evidence.c.test,
    )
    tokens = many.About(lambda mine: select(t.evidence.c.test, t.evidence.c.tokens).where(mine), t.evidence.c.test)
    async with run.db.write() as connection:
        await raise_them.execute(connection, ["a", "c", "nobody", "x" * 33], more=2**40)
        await raise_them.execute(connection, [], more=1)
        await raise_them.execute(connection, ["b"], more=1)
    async with run.db.read() as connection:
        found = {row.test: row.tokens for row in await tokens.execute(connection, ["a", "b", "x" * 32, "x" * 33])}
        assert (await tokens.execute(connection, [])).all() == []
    assert found == {"a": 7 + 2**40, "b": 8, "x" * 32: 7}, "a name that is too long is nobody's, not a shorter one's"
