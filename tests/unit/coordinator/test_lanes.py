"""Two replicas, two verifiers, a trainer and a crowd at once: writers that wait for one another as little as `Lane` says."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from coordinator import granting
from coordinator.feeding import Feeding
from coordinator.store import database, rollouts
from coordinator.store import leases as lease_store
from coordinator.store import tables as t
from coordinator.store.database import Lane
from protocol.errors import WorkerFault
from protocol.lease import Commitment, Lease
from protocol.rollout import RejectionReason, token_digest
from protocol.signing import ROLLOUT, Identity
from tests.factories import make_identity, make_tokens
from tests.stored_run import StoredRun, accepted, inconclusive, rejected

Begin = Callable[..., Awaitable[StoredRun]]

_SOON_S = 180.0
_ROUNDS = 8  # of each worker, and more where the machine is so slow that most leases run out
_RECEIPTS = 31  # at least
_CHEAT = make_identity(666)


class Crowd:
    """What goes on at once, and what was promised meanwhile."""

    def __init__(self, replicas: list[StoredRun], seed: int) -> None:
        self._replicas = replicas
        self._random = random.Random(seed)
        self.receipts: set[str] = set()
        self.working = True

    def _any(self) -> StoredRun:
        return self._random.choice(self._replicas)

    async def work(self, worker: Identity) -> None:
        done = 0
        while done < _ROUNDS or len(self.receipts) < _RECEIPTS:
            done += 1
            try:
                leases = await self._any().lease(worker, self._random.randint(1, 3))
            except WorkerFault as fault:
                assert worker is _CHEAT and "banned" in fault.detail
                return
            for lease in leases:
                await self._use(worker, lease)
            await asyncio.sleep(0.01)

    async def _use(self, worker: Identity, lease: Lease) -> None:
        """Renew it; then hand in, give back, or fall silent."""
        run, tokens = self._any(), make_tokens(8)
        await run.leasing.renew(worker.key_id, [(lease.lease_id, Commitment(4, token_digest(tokens[:4]), 0))])
        choice = self._random.random()
        if choice < 0.1:
            await run.leasing.give_back(worker.key_id, [lease.lease_id])
        elif choice < 0.9:
            try:
                self.receipts.add(await run.submit(worker, lease, tokens=tokens))
            except WorkerFault as fault:  # it ran out, or a ban or the group's end took it
                assert fault.reason is RejectionReason.LEASE, fault

    async def verify(self, number: int) -> None:
        while self.working:
            await self.judge(f"verifier-{number}", limit=8)
            await asyncio.sleep(0.005)

    async def judge(self, verifier: str, limit: int = 1000, *, hesitates: bool = True) -> None:
        run = self._any()
        claimed = await run.claim(verifier, limit)
        found = {}
        for each in claimed:
            doubt = hesitates and self._random.random() < 0.05
            cheated = each.worker_id == _CHEAT.key_id
            found[each.rollout_id] = rejected() if cheated else inconclusive() if doubt else accepted(each)
        await run.record_all(found, verifier)

    async def expire(self) -> None:
        while self.working:
            await self._any().leasing.expire()
            await asyncio.sleep(0.02)

    async def train(self) -> None:
        batch = 0
        while self.working:
            feeding: Feeding = self._any().feeding
            held: list[str] = []
            while self.working and len(held) < 2:
                groups = await feeding.pull(batch=batch, trainer_version=0, held=held, max_groups=2)
                held += [group.group_id for group in groups]
                await asyncio.sleep(0.02)
            await self._any().step(batch, 0)
            await feeding.acknowledge(batch)
            batch += 1


async def test_whatever_happens_at_once_the_books_balance(begin: Begin) -> None:
    numbers = {"lease_term_s": 0.5, "group_deadline_s": 1.0, "max_staleness": 7, "min_group": 1}
    replicas = [await begin(**numbers), await begin(**numbers)]
    workers = [*(make_identity(200 + number) for number in range(8)), _CHEAT]
    await replicas[0].join(*workers)
    before = await _deadlocks(replicas[0])
    crowd = Crowd(replicas, seed=1)
    async with asyncio.timeout(_SOON_S), asyncio.TaskGroup() as group:
        others = (crowd.verify(1), crowd.verify(2), crowd.expire(), crowd.train())
        tasks = [group.create_task(each) for each in others]
        await asyncio.gather(*(crowd.work(worker) for worker in workers))
        crowd.working = False
        await asyncio.gather(*tasks)
    await replicas[1].db.close()
    run = replicas[0]
    await run.change(t.rollouts, t.rollouts.c.state.in_(("pending", "verifying")), claim_deadline=1.0)
    await crowd.judge("verifier-3", hesitates=False)
    assert len(crowd.receipts) >= _RECEIPTS and await run.rows(t.consumptions)
    await _check_leases(run)
    await _check_rollouts(run, crowd.receipts)
    for worker in workers:
        standing = await run.standing(worker)
        assert standing.banned is (worker is _CHEAT)
        lines = await run.rows(t.ledger, t.ledger.c.worker_id == worker.key_id, t.ledger.c.kind == "credit")
        assert (standing.credits, standing.accepted) == (sum(line.amount for line in lines), len(lines))
    assert await _deadlocks(run) == before, "writers waited for one another in a circle"


async def _deadlocks(run: StoredRun) -> int:
    """How many PostgreSQL has broken in this database. Its sessions say so when they end."""
    if run.db.is_sqlite:
        return 0
    await run.db.close()
    async with run.db.read() as connection:
        found = await connection.execute(
            text("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        )
        return int(found.scalar_one())


async def _check_leases(run: StoredRun) -> None:
    """A sample is leased if and only if there is one live lease of it; groups that are over have none."""
    live = Counter(row.sample_id for row in await run.rows(t.leases, t.leases.c.state == "live"))
    samples = await run.rows(t.samples)
    assert live == Counter(row.sample_id for row in samples if row.state == "leased")
    over = {row.group_id for row in await run.rows(t.groups, t.groups.c.state.in_(("served", "done", "dropped")))}
    # What is turned down after its group went out waits again, for nobody: leases are of open groups alone.
    turned_down = {row.sample_id for row in await run.rows(t.rollouts, t.rollouts.c.state.in_(("rejected", "dropped")))}
    left = {row.sample_id for row in samples if row.group_id in over and row.state in ("waiting", "leased")}
    assert left <= turned_down and not left & set(live)


async def _check_rollouts(run: StoredRun, receipts: set[str]) -> None:
    """All that was receipted is there; what was accepted waits in a group that is not over, or was consumed once."""
    rollouts = {row.rollout_id: row for row in await run.rows(t.rollouts)}
    assert receipts <= set(rollouts)
    consumed = {row.rollout_id for row in await run.rows(t.consumptions)}
    used = {key for key, row in rollouts.items() if row.state in ("served", "trained")}
    assert used == consumed
    states = {row.group_id: row.state for row in await run.rows(t.groups)}
    for row in rollouts.values():
        assert row.state in ("accepted", "served", "trained", "rejected", "dropped"), row
        assert row.state != "accepted" or states[row.group_id] in ("open", "ready"), row
    by_sample = Counter(row.sample_id for row in rollouts.values() if row.state not in ("rejected", "dropped"))
    assert max(by_sample.values()) == 1


async def test_the_leases_of_all_groups_that_end_are_locked_in_order(
    run: StoredRun, alice: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renewal that has locked the lease of a later group waits for one of an earlier group: the trainer waits for it."""
    if run.db.is_sqlite:  # one writer at a time
        return
    falling = itertools.count(1000, -1)
    monkeypatch.setattr(granting.secrets, "token_hex", lambda length: f"{next(falling):032x}")
    ids = [lease.lease_id for lease in await run.lease(alice, 4)]
    await run.change(t.groups, deadline=1.0)
    before = await _deadlocks(run)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks, run.db.write(Lane.ROWS) as connection:
        await lease_store.held(connection, [min(ids)])
        tasks.create_task(run.pull())
        await _wait_for_a_lock(run)
        await lease_store.held(connection, [max(ids)])
    assert await _deadlocks(run) == before
    assert {row.state for row in await run.rows(t.groups)} == {"dropped"}


async def test_a_verdict_that_comes_too_late_waits_for_no_rollout_that_is_served(
    run: StoredRun, alice: Identity
) -> None:
    """Another verifier took the claims over, and the trainer the group: it locks its rollouts in another order."""
    first, second = await run.work(alice, 2)
    late = {pending.rollout_id: accepted(pending) for pending in await run.claim("slow")}
    await run.let_claims_expire()
    await run.record_all({pending.rollout_id: accepted(pending) for pending in await run.claim()})
    async with run.db.write(Lane.TRAINING) as connection:
        await rollouts.set_state(connection, [second], "served")
        if not run.db.is_sqlite:  # one writer at a time
            async with asyncio.timeout(20):
                await run.record_all(late, "slow")
        await rollouts.set_state(connection, [first], "served")
    assert (await run.standing(alice)).accepted == 2


async def _wait_for_a_lock(run: StoredRun) -> None:
    """Until somebody waits for a row that another holds."""
    waiting = text(
        "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype IN ('transactionid', 'tuple') AND pid IN "
        "(SELECT pid FROM pg_stat_activity WHERE datname = current_database())"
    )
    while True:
        async with run.db.read() as connection:
            if (await connection.execute(waiting)).scalar_one():
                return
        await asyncio.sleep(0.02)


FREE = {
    Lane.ALONE: set(),
    Lane.ROWS: {Lane.ROWS, Lane.GRANTS, Lane.VERDICTS, Lane.TRAINING, Lane.FEEDING},
    Lane.GRANTS: {Lane.ROWS, Lane.VERDICTS, Lane.TRAINING},
    Lane.VERDICTS: {Lane.ROWS, Lane.GRANTS, Lane.TRAINING},
    Lane.TRAINING: {Lane.ROWS, Lane.GRANTS, Lane.VERDICTS},
    Lane.FEEDING: {Lane.ROWS},
}


@pytest.mark.parametrize("held", list(Lane))
async def test_who_waits_for_whom(run: StoredRun, held: Lane) -> None:
    free = set() if run.db.is_sqlite else FREE[held]
    found = set()
    async with run.db.write(held) as connection:
        await database.now(connection)
        for asked in () if run.db.is_sqlite else Lane:
            try:
                async with asyncio.timeout(20.0 if asked in free else 0.3), run.db.write(asked):
                    found.add(asked)
            except TimeoutError:
                continue
    assert found == free


async def test_who_falls_silent_in_a_transaction_holds_up_nobody_for_long(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica or a verifier that is halted, or whose machine vanishes. (SQLite is on the machine that has it.)"""
    monkeypatch.setattr(database, "_SILENT_S", 0.5)
    run = await begin()
    if run.db.is_sqlite:
        return
    silent = run.db.write(Lane.ROWS)
    await silent.__aenter__()
    async with asyncio.timeout(20), run.db.write():
        pass
    with pytest.raises(DBAPIError):
        await silent.__aexit__(None, None, None)


async def test_the_time_that_a_lane_came_with_ends_with_its_transaction(run: StoredRun) -> None:
    async with run.db.write() as connection:
        first, second = await database.now(connection), await database.now(connection)
        assert first <= second
        async with run.db.read() as other:
            mark = await database.now(other)
        assert second <= mark
    async with run.db.write(), run.db.read() as other:  # who writes does not ask
        mark = await database.now(other)
    async with run.db.read() as one, run.db.read() as another:  # of the pool's connections, those two
        assert mark <= await database.now(one) <= await database.now(another)


async def test_what_trainer_worker_and_refused_ask_for_waits_for_no_lane_but_its_own(
    begin: Begin, alice: Identity
) -> None:
    """While leases are granted and submissions stored, however long that takes; none of it is so rare that all may wait."""
    run = await begin()
    await run.work(alice, 4)
    await run.judge()
    (open_lease,) = await run.lease(alice, 1)
    cheat = make_identity(667)
    await run.join(cheat)
    struck = cheat.sign(ROLLOUT, b"no rollout")
    with pytest.raises(WorkerFault):
        await run.intake.submit(cheat.key_id, struck)
    assert (await run.standing(cheat)).banned

    async def all_of_it() -> None:
        groups = await run.pull()
        assert len(groups) == 2
        await run.step(0, 0, [rollout.rollout_id for group in groups for rollout in group.rollouts])
        assert await run.announce(1) == 1
        assert await run.feeding.acknowledge(0) == 1
        assert (await run.register(make_identity(668))).token
        with pytest.raises(WorkerFault, match="no such lease"):  # costs nobody anything
            await run.intake.submit(
                alice.key_id, run.envelope(alice, Lease("0" * 32, open_lease.sample_id, "", 0, 0.0))
            )
        with pytest.raises(WorkerFault):  # of a key that is banned: struck no more
            await run.intake.submit(cheat.key_id, struck)

    async with contextlib.AsyncExitStack() as held:
        for lane in () if run.db.is_sqlite else (Lane.GRANTS, Lane.ROWS):
            await held.enter_async_context(run.db.write(lane))
        async with asyncio.timeout(30):
            await all_of_it()
