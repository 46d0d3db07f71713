"""The promises that the database itself keeps, whatever the code above it does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy.exc import IntegrityError

from coordinator.store import database, leases, rollouts, versions, workers
from coordinator.store import run as run_store
from coordinator.store import tables as t
from coordinator.store.database import Database
from coordinator.store.leases import NewLease
from coordinator.store.rollouts import NewRollout
from protocol.errors import UserError
from protocol.ledger import Entry, EntryKind, fold
from protocol.policy import PolicyVersion
from protocol.signing import Identity
from tests.factories import (
    RUN_ID,
    SECRET,
    TRAINER,
    make_rollout,
    make_tokens,
    make_version,
    sign_rollout,
    version_digest,
)
from tests.stored_run import StoredRun, accepted

Begin = Callable[..., Awaitable[StoredRun]]


async def refuses(run: StoredRun, statement: Any) -> None:
    with pytest.raises(IntegrityError):
        async with run.db.write() as connection:
            await connection.execute(statement)


async def test_a_sample_has_one_live_lease(run: StoredRun, alice: Identity, bob: Identity) -> None:
    lease = await run.lease_one(alice)
    with pytest.raises(IntegrityError):
        async with run.db.write() as connection:
            second = NewLease(replace(lease, lease_id="second", worker_id=bob.key_id))
            await leases.insert(connection, [second], 0.0)
    assert len(await run.rows(t.leases)) == 1
    assert (await run.row(t.samples, t.samples.c.sample_id == lease.sample_id)).attempts == 1


async def test_an_ended_lease_makes_room_for_another(run: StoredRun, alice: Identity, bob: Identity) -> None:
    lease = await run.lease_one(alice)
    await run.leasing.give_back(alice.key_id, [lease.lease_id])
    async with run.db.write() as connection:
        second = NewLease(replace(lease, lease_id="second", worker_id=bob.key_id))
        await leases.insert(connection, [second], 0.0)
    await run_refuses_revival(run, lease.lease_id)


async def run_refuses_revival(run: StoredRun, lease_id: str) -> None:
    await refuses(run, t.leases.update().where(t.leases.c.lease_id == lease_id).values(state="live"))


async def test_a_lease_is_answered_once(run: StoredRun, alice: Identity) -> None:
    lease = await run.lease_one(alice)
    await run.submit(alice, lease)
    rollout = make_rollout(lease.lease_id, lease.sample_id, tokens=make_tokens(7))
    with pytest.raises(IntegrityError):
        async with run.db.write() as connection:
            other = NewRollout("sha256:other", rollout, "g0", alice.key_id, sign_rollout(rollout, alice))
            await rollouts.insert(connection, [other], 0.0)


async def test_a_sample_has_one_rollout_under_way(run: StoredRun, alice: Identity, bob: Identity) -> None:
    await run.work(alice, 1)
    (first,) = await run.rows(t.rollouts)
    await run.change(t.samples, t.samples.c.sample_id == "g0-0", state="waiting")
    lease = await run.lease_one(bob)
    assert lease.sample_id == "g0-0"
    values = {**first._mapping, "rollout_id": "sha256:second", "lease_id": lease.lease_id}
    await refuses(run, t.rollouts.insert().values(**values))
    await run.change(t.rollouts, state="rejected")
    async with run.db.write() as connection:
        await connection.execute(t.rollouts.insert().values(**values))
    assert len(await run.rows(t.rollouts)) == 2


async def test_nothing_is_consumed_without_a_verdict(run: StoredRun, alice: Identity) -> None:
    (identifier,) = await run.work(alice, 1)
    await run.pull()
    consumption = t.consumptions.insert().values(rollout_id=identifier, batch=0, staleness=0, trained=False)
    await refuses(run, consumption)
    await run.judge()
    async with run.db.write() as connection:
        await connection.execute(consumption)
    assert len(await run.rows(t.consumptions)) == 1


async def test_nothing_is_consumed_twice(run: StoredRun, alice: Identity) -> None:
    await run.work(alice, 2)
    first, _ = await run.judge()
    await run.pull(batch=0)
    await run.pull(batch=1)
    for batch in (0, 1):
        await refuses(run, t.consumptions.insert().values(rollout_id=first, batch=batch, staleness=0, trained=False))


async def test_a_rollout_is_credited_and_struck_once(run: StoredRun, alice: Identity) -> None:
    (identifier,) = await run.work(alice, 1)
    for kind in (EntryKind.CREDIT, EntryKind.STRIKE):
        entry = Entry(alice.key_id, kind, 6, identifier)
        async with run.db.write() as connection:
            await workers.add_entries(connection, [entry], 0.0)
        with pytest.raises(IntegrityError):
            async with run.db.write() as connection:
                await workers.add_entries(connection, [entry], 0.0)
    standing = await run.standing(alice)
    assert (standing.credits, standing.strikes) == (6, 6), "a failed transaction leaves the standing alone"


@pytest.mark.parametrize(
    "kinds",
    [
        [EntryKind.CREDIT, EntryKind.STRIKE, EntryKind.CREDIT],
        [EntryKind.STRIKE, EntryKind.BAN],
        [EntryKind.STRIKE, EntryKind.BAN, EntryKind.PARDON],
        [EntryKind.STRIKE, EntryKind.PARDON, EntryKind.STRIKE, EntryKind.CREDIT],
        [EntryKind.BAN, EntryKind.PARDON, EntryKind.BAN],
    ],
)
@pytest.mark.parametrize("together", [True, False])
async def test_the_stored_standing_is_the_folded_ledger(
    run: StoredRun, alice: Identity, bob: Identity, kinds: list[EntryKind], together: bool
) -> None:
    lines = [Entry(alice.key_id, kind, 3 + i, f"r{i}", f"note {i}") for i, kind in enumerate(kinds)]
    lines.insert(1, Entry(bob.key_id, EntryKind.CREDIT, 50, "b"))
    for portion in [lines] if together else [[line] for line in lines]:
        async with run.db.write() as connection:
            await workers.add_entries(connection, portion, 0.0)
    for worker in (alice, bob):
        async with run.db.read() as connection:
            ledger = await workers.entries(connection, worker.key_id)
        assert ledger == [line for line in lines if line.worker_id == worker.key_id]
        assert await run.standing(worker) == fold(ledger)


async def test_a_version_number_names_one_digest_for_ever(run: StoredRun) -> None:
    assert await run.announce(0) == 0, "announcing the same again changes nothing"
    with pytest.raises(UserError, match="for ever"):
        await run.feeding.announce(make_version(0, content="other weights"))
    assert await run.announce(1) == 1
    with pytest.raises(UserError, match="for ever"):
        await run.feeding.announce(make_version(1, content="other weights"))
    async with run.db.read() as connection:
        assert await versions.digests(connection) == {0: version_digest(0), 1: version_digest(1)}


@pytest.mark.parametrize("version", [2, 7])
async def test_version_numbers_leave_no_gap(run: StoredRun, version: int) -> None:
    with pytest.raises(UserError, match="the next policy version is 1"):
        await run.announce(version)


async def test_a_withdrawn_number_is_never_used_again(begin: Begin) -> None:
    run = await begin(versions=3)
    await run.change(t.policy_versions, t.policy_versions.c.version == 2, withdrawn=True)
    async with run.db.read() as connection:
        assert await versions.head(connection) == PolicyVersion(1, version_digest(1))
        assert set(await versions.digests(connection)) == {0, 1}
    with pytest.raises(UserError, match="was withdrawn"):
        await run.feeding.announce(make_version(2, content="better weights"))
    assert await run.announce(3) == 3


async def required(run: StoredRun) -> list[int]:
    async with run.db.read() as connection:
        return await versions.required(connection)


async def test_nothing_is_required_before_the_first_version(begin: Begin) -> None:
    assert await required(await begin(versions=0)) == []


async def test_the_head_is_always_required(begin: Begin) -> None:
    assert await required(await begin(versions=5)) == [4]


async def test_what_a_live_lease_may_use_is_required(begin: Begin, alice: Identity) -> None:
    run = await begin(versions=5, max_staleness=2)
    lease = await run.lease_one(alice)
    assert await required(run) == [2, 3, 4]
    await run.leasing.give_back(alice.key_id, [lease.lease_id])
    assert await required(run) == [4]


async def test_what_an_unresolved_rollout_names_is_required(begin: Begin, alice: Identity) -> None:
    run = await begin(versions=3, max_staleness=2)
    await run.work(alice, 1, versions=(1, 2))
    assert await required(run) == [1, 2]
    (pending,) = await run.claim()
    assert await required(run) == [1, 2]
    await run.record(pending.rollout_id, accepted(pending))
    assert await required(run) == [2]


async def test_what_an_unacknowledged_batch_names_is_required(begin: Begin, alice: Identity) -> None:
    run = await begin(versions=3, max_staleness=2)
    await run.work(alice, 2, versions=(1, 2))
    await run.judge()
    assert await required(run) == [2]
    assert len(await run.pull(version=2)) == 1
    assert await required(run) == [1, 2]
    await run.feeding.acknowledge(0)
    assert await required(run) == [2]


async def test_a_run_keeps_its_id_and_secret(run: StoredRun) -> None:
    again = await run_store.load_or_begin(
        run.db, run_id="another", name="test", secret=bytes(32), trainer_key=TRAINER.key_id
    )
    assert (again.run_id, again.secret) == (RUN_ID, SECRET)
    assert len(await run.rows(t.runs)) == 1


@pytest.mark.parametrize(
    ("name", "key", "message"),
    [("other", TRAINER.key_id, "use another database"), ("test", "ed25519:" + "0" * 64, "another trainer key")],
)
async def test_a_database_belongs_to_one_run(run: StoredRun, name: str, key: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        await run_store.load_or_begin(run.db, run_id="x", name=name, secret=bytes(32), trainer_key=key)


async def test_a_failed_transaction_leaves_nothing(run: StoredRun) -> None:
    with pytest.raises(ZeroDivisionError):
        async with run.db.write() as connection:
            await connection.execute(t.workers.update().values(credits=5))
            raise ZeroDivisionError
    assert {row.credits for row in await run.rows(t.workers)} == {0}


async def test_deadlines_go_by_the_databases_clock(run: StoredRun) -> None:
    async with run.db.read() as connection:
        first = await database.now(connection)
        second = await database.now(connection)
    assert second >= first > 1_700_000_000


async def test_a_reader_sees_one_snapshot(run: StoredRun) -> None:
    async with run.db.read() as connection:
        before = (await connection.execute(t.workers.select())).all()
        await run.change(t.workers, credits=7)
        assert (await connection.execute(t.workers.select())).all() == before
    assert {row.credits for row in await run.rows(t.workers)} == {7}


@pytest.mark.parametrize("url", ["nonsense", "mysql://host/x", "sqlite:///run.db", "postgresql://host/x", ""])
def test_another_kind_of_database_is_the_users_mistake(url: str) -> None:
    with pytest.raises(UserError, match=r"run\.database"):
        Database.open(url)
