from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

import pytest
from sqlalchemy import select, update

from coordinator.grouping import EnvironmentShare
from coordinator.leasing import Leasing
from coordinator.scheduling import Freshness
from coordinator.store import run as run_store
from coordinator.store import tables as t
from protocol.errors import OurFault, WorkerFault
from protocol.lease import Commitment, Lease
from protocol.ledger import Entry, EntryKind
from protocol.rollout import Task, token_digest
from protocol.signing import Identity
from tests.factories import SECRET, make_identity, make_tokens
from tests.stored_run import StoredRun, rejected

Begin = Callable[..., Awaitable[StoredRun]]


async def seed_of(run: StoredRun, sample_id: str) -> int:
    return int((await run.row(t.samples, t.samples.c.sample_id == sample_id)).seed)


def progress(lease: Lease, tokens: tuple[int, ...], version: int = 0) -> list[tuple[str, Commitment]]:
    return [(lease.lease_id, Commitment(len(tokens), token_digest(tokens) if tokens else b"", version))]


async def test_a_lease_names_sample_version_and_deadline(run: StoredRun, alice: Identity) -> None:
    granted = await run.leasing.acquire(alice.key_id, 1)
    ((lease, sample),) = granted.leases
    assert (lease.sample_id, lease.worker_id, lease.min_version) == ("g0-0", alice.key_id, 0)
    assert lease.deadline == pytest.approx(granted.now + run.scheduling.lease_term_s)
    assert bytes(sample.prompt_token_ids).decode() == "0 + 1 ="
    assert granted.head == 0


async def test_samples_are_leased_in_the_order_of_dispatch(run: StoredRun, alice: Identity, bob: Identity) -> None:
    first, second = await run.lease(alice, 3), await run.lease(bob, 3)
    assert [lease.sample_id for lease in first] == ["g0-0", "g0-1", "g1-0"]
    assert [lease.sample_id for lease in second] == ["g1-1", "g2-0", "g2-1"]


async def test_nothing_is_leased_before_the_first_version(begin: Begin, alice: Identity) -> None:
    run = await begin(versions=0)
    granted = await run.leasing.acquire(alice.key_id, 1)
    assert (granted.leases, granted.reason) == ((), "no policy version is published yet")


async def test_the_oldest_admissible_version_goes_with_the_lease(begin: Begin, alice: Identity) -> None:
    run = await begin(versions=4)
    assert (await run.lease_one(alice)).min_version == 2


async def test_leases_and_unconsumed_rollouts_never_exceed_the_capacity(
    run: StoredRun, alice: Identity, bob: Identity
) -> None:
    assert len(await run.lease(alice, 5)) == 5
    assert len(await run.lease(bob, 256)) == 3, "(1 + 1) · 4 samples"
    refused = await run.leasing.acquire(alice.key_id, 1)
    assert (refused.leases, refused.reason) == ((), "capacity")


async def test_what_is_handed_in_takes_room_until_its_step_is_reported(run: StoredRun, alice: Identity) -> None:
    await run.work(alice, 4)
    assert len(await run.lease(alice, 256)) == 4
    await run.judge()
    assert (await run.leasing.acquire(alice.key_id, 1)).reason == "capacity"
    assert len(await run.pull()) == 2
    assert (await run.leasing.acquire(alice.key_id, 1)).reason == "capacity", "the trainer is still stepping on it"
    await run.step()
    assert len(await run.lease(alice, 256)) == 4


async def test_many_workers_at_once_stay_within_the_capacity(run: StoredRun) -> None:
    crowd = [make_identity(100 + i) for i in range(8)]
    await run.join(*crowd)
    granted = await asyncio.gather(*(run.lease(worker, 3) for worker in crowd))
    samples = [lease.sample_id for leases in granted for lease in leases]
    assert len(samples) == len(set(samples)) == 8


async def test_newcomers_share_their_part_of_the_capacity(begin: Begin, alice: Identity, bob: Identity) -> None:
    run = await begin(newcomer_share=0.5, probation_rollouts=2)
    assert len(await run.lease(alice, 256)) == 4
    assert (await run.leasing.acquire(bob.key_id, 1)).reason == "newcomers"
    await run.change(t.workers, t.workers.c.worker_id == bob.key_id, accepted=2)
    assert len(await run.lease(bob, 256)) == 4


async def test_a_worker_keeps_to_its_share_of_a_group_and_of_all(begin: Begin, alice: Identity, bob: Identity) -> None:
    run = await begin(group_size=4, worker_share=0.5)
    await run.lease(bob, 1)  # is active, and holds one of the first group
    mine: list[str] = []
    while (granted := await run.leasing.acquire(alice.key_id, 256)).leases:
        mine += [sample.group_id for _, sample in granted.leases]
    assert granted.reason == "share"
    assert (len(mine), max(mine.count(group) for group in mine)) == (8, 2), "half of (1 + 1) · 8, half of each group"
    left = [lease for _ in range(4) for lease in await run.lease(bob, 256)]
    assert len(left) == 7, "what is left is there for others"


async def test_what_a_worker_handed_in_counts_to_its_share_of_a_group(
    begin: Begin, alice: Identity, bob: Identity
) -> None:
    run = await begin(group_size=4, worker_share=0.5)
    await run.lease(bob, 1)
    await run.work(alice, 2)
    groups = {sample.group_id for _, sample in (await run.leasing.acquire(alice.key_id, 1)).leases}
    assert groups == {"g1"}, "half of the first group is Alice's already"


async def test_a_worker_alone_may_have_everything(begin: Begin, alice: Identity, bob: Identity) -> None:
    run = await begin(group_size=4, worker_share=0.25, lease_term_s=30.0)
    await run.change(t.workers, t.workers.c.worker_id == bob.key_id, last_seen_at=1.0)
    assert len(await run.lease(alice, 256)) == 16


async def test_a_paused_run_leases_nothing(run: StoredRun, alice: Identity) -> None:
    await run_store.set_paused(run.db, True)
    assert (await run.leasing.acquire(alice.key_id, 1)).reason == "paused"
    await run_store.set_paused(run.db, False)
    assert await run.lease(alice)


async def test_who_never_registered_gets_nothing(run: StoredRun) -> None:
    with pytest.raises(WorkerFault, match="never registered"):
        await run.leasing.acquire(make_identity(99).key_id, 1)


async def test_who_is_banned_gets_nothing_and_hears_why(run: StoredRun, alice: Identity) -> None:
    await run.change(t.workers, t.workers.c.worker_id == alice.key_id, banned=True, ban_reason="forged proofs")
    with pytest.raises(WorkerFault, match="banned: forged proofs"):
        await run.leasing.acquire(alice.key_id, 1)


async def test_an_expired_sample_is_leased_again_with_the_same_seed(
    run: StoredRun, alice: Identity, bob: Identity
) -> None:
    lease = await run.lease_one(alice)
    seed = await seed_of(run, lease.sample_id)
    await run.let_lease_expire(lease)
    assert await run.leasing.expire() == 1
    assert await run.sample_state(lease.sample_id) == "waiting"
    again = await run.lease_one(bob)
    assert (again.sample_id, await seed_of(run, again.sample_id)) == (lease.sample_id, seed)
    assert again.lease_id != lease.lease_id


async def test_what_is_overdue_is_freed_by_the_next_one_who_asks(
    run: StoredRun, alice: Identity, bob: Identity
) -> None:
    lease = await run.lease_one(alice)
    await run.let_lease_expire(lease)
    assert (await run.lease_one(bob)).sample_id == lease.sample_id


async def test_a_returned_sample_is_leased_again_with_the_same_seed(
    run: StoredRun, alice: Identity, bob: Identity
) -> None:
    lease = await run.lease_one(alice)
    seed = await seed_of(run, lease.sample_id)
    assert await run.leasing.give_back(alice.key_id, [lease.lease_id]) == 1
    assert await run.leasing.give_back(alice.key_id, [lease.lease_id]) == 0, "only what is live is returned"
    granted = await run.leasing.acquire(bob.key_id, 1)
    assert (granted.leases[0][1].sample_id, granted.leases[0][1].seed) == (lease.sample_id, seed)


async def test_a_rejected_sample_is_leased_again_with_the_same_seed(
    run: StoredRun, alice: Identity, bob: Identity
) -> None:
    lease = await run.lease_one(alice)
    seed = await seed_of(run, lease.sample_id)
    await run.submit(alice, lease)
    await run.judge(rejected())
    granted = await run.leasing.acquire(bob.key_id, 1)
    assert (granted.leases[0][1].sample_id, granted.leases[0][1].seed) == (lease.sample_id, seed)


@pytest.mark.parametrize("how", ["expired", "returned", "rejected"])
async def test_who_gave_a_sample_up_gets_it_last(run: StoredRun, alice: Identity, how: str) -> None:
    lease = await run.lease_one(alice)
    if how == "expired":
        await run.let_lease_expire(lease)
    elif how == "returned":
        await run.leasing.give_back(alice.key_id, [lease.lease_id])
    else:
        await run.submit(alice, lease)
        await run.judge(rejected())
    assert [again.sample_id for again in await run.lease(alice, 3)] == ["g0-1", "g1-0", "g1-1"]
    assert [again.sample_id for again in await run.lease(alice, 1)] == ["g0-0"]


async def test_a_lone_worker_gets_back_what_it_gave_up_once_nothing_else_waits(begin: Begin, alice: Identity) -> None:
    run = await begin(groups_per_batch=1, max_staleness=0)
    leases = await run.lease(alice, 2)
    await run.leasing.give_back(alice.key_id, [lease.lease_id for lease in leases])
    assert [lease.sample_id for lease in await run.lease(alice, 2)] == [lease.sample_id for lease in leases]


async def test_a_lease_cannot_be_returned_or_renewed_by_another_worker(
    run: StoredRun, alice: Identity, bob: Identity
) -> None:
    lease = await run.lease_one(alice)
    assert await run.leasing.give_back(bob.key_id, [lease.lease_id]) == 0
    (renewal,), _ = await run.leasing.renew(bob.key_id, progress(lease, ()))
    assert renewal.problem == "there is no such lease of yours"
    (renewal,), _ = await run.leasing.renew(alice.key_id, progress(lease, ()))
    assert not renewal.problem


async def test_a_renewal_moves_the_deadline_and_is_kept(run: StoredRun, alice: Identity) -> None:
    lease = await run.lease_one(alice)
    await run.change(t.leases, t.leases.c.lease_id == lease.lease_id, deadline=lease.deadline - 30)
    (renewal,), head = await run.leasing.renew(alice.key_id, progress(lease, (1, 2, 3)))
    assert (renewal.problem, head) == ("", 0)
    assert renewal.deadline >= lease.deadline
    row = await run.row(t.leases, t.leases.c.lease_id == lease.lease_id)
    assert (row.deadline, row.committed_length) == (renewal.deadline, 3)
    assert bytes(row.committed_digest) == token_digest((1, 2, 3))


async def test_renewals_without_end_are_answered_and_not_written(begin: Begin, alice: Identity) -> None:
    run = await begin(freshness=Freshness(renewal_terms=0.5))
    lease = await run.lease_one(alice)
    (soon,), _ = await run.leasing.renew(alice.key_id, progress(lease, (1, 2, 3)))
    assert (soon.problem, soon.deadline) == ("", pytest.approx(lease.deadline))
    assert (await run.row(t.leases)).committed_length == 0
    await run.change(t.leases, deadline=lease.deadline - run.scheduling.lease_term_s / 2)
    (late,), _ = await run.leasing.renew(alice.key_id, progress(lease, (1, 2, 3)))
    assert late.deadline >= lease.deadline and (await run.row(t.leases)).committed_length == 3
    (broken,), _ = await run.leasing.renew(alice.key_id, progress(lease, (1, 2)))
    assert "committed before" in broken.problem, "but never too soon for what can't be"


@pytest.mark.parametrize("later", [(1, 2), (1, 2, 4)], ids=["shrunk", "changed"])
async def test_progress_that_shrinks_or_changes_ends_the_lease(
    run: StoredRun, alice: Identity, later: tuple[int, ...]
) -> None:
    lease = await run.lease_one(alice)
    await run.leasing.renew(alice.key_id, progress(lease, (1, 2, 3)))
    (renewal,), _ = await run.leasing.renew(alice.key_id, progress(lease, later))
    assert "committed before" in renewal.problem
    assert (await run.row(t.leases)).state == "returned", "by its holder's own doing"
    assert await run.sample_state(lease.sample_id) == "waiting"


async def test_what_began_under_a_version_that_is_too_old_is_revoked_at_renewal(begin: Begin, alice: Identity) -> None:
    run = await begin(max_staleness=1)
    lease = await run.lease_one(alice)
    tokens = make_tokens(6)
    await run.leasing.renew(alice.key_id, progress(lease, tokens[:2], version=0))
    await run.announce(1)
    (renewal,), _ = await run.leasing.renew(alice.key_id, progress(lease, tokens[:3], version=1))
    assert not renewal.problem, "version 0 is still admissible, and the newer token changes nothing"
    await run.announce(2)
    (renewal,), head = await run.leasing.renew(alice.key_id, progress(lease, tokens[:4], version=2))
    assert (renewal.problem, head) == ("only versions from 1 on are still admissible", 2)
    assert await run.sample_state(lease.sample_id) == "waiting"


async def test_a_lease_that_has_not_begun_survives_new_versions(begin: Begin, alice: Identity) -> None:
    run = await begin(max_staleness=0)
    lease = await run.lease_one(alice)
    await run.announce(1)
    (renewal,), _ = await run.leasing.renew(alice.key_id, progress(lease, ()))
    assert not renewal.problem


async def test_an_expired_lease_cannot_be_renewed(run: StoredRun, alice: Identity) -> None:
    lease = await run.lease_one(alice)
    await run.let_lease_expire(lease)
    (renewal,), _ = await run.leasing.renew(alice.key_id, progress(lease, ()))
    assert "expired" in renewal.problem


@pytest.mark.parametrize(
    "commitment",
    [Commitment(2**32 - 1, bytes(32), 0), Commitment(1, b"", 0)],
    ids=["endless", "no digest"],
)
async def test_hostile_progress_ends_that_lease_and_no_other(
    run: StoredRun, alice: Identity, commitment: Commitment
) -> None:
    bad, good = await run.lease(alice, 2)
    renewals, _ = await run.leasing.renew(alice.key_id, [(bad.lease_id, commitment), *progress(good, ())])
    assert renewals[0].problem and not renewals[1].problem


async def test_a_lease_id_that_no_database_can_hold_is_unknown(run: StoredRun, alice: Identity) -> None:
    (renewal,), _ = await run.leasing.renew(alice.key_id, [("a\0b", Commitment())])
    assert renewal.problem == "there is no such lease of yours"
    assert await run.leasing.give_back(alice.key_id, ["a\0b"]) == 0


async def test_leases_are_given_back_by_their_holder_alone_and_once(
    run: StoredRun, alice: Identity, bob: Identity
) -> None:
    mine, kept = await run.lease(alice, 2)
    theirs = await run.lease_one(bob)
    ids = [mine.lease_id, mine.lease_id, theirs.lease_id, "no such lease"]
    answers = await asyncio.gather(*(run.leasing.give_back(alice.key_id, ids) for _ in range(3)))
    assert sorted(answers) == [0, 0, 1]
    assert await run.leasing.live_among(alice.key_id, [*ids, kept.lease_id]) == {kept.lease_id}
    assert await run.leasing.live_among(bob.key_id, [*ids, kept.lease_id]) == {theirs.lease_id}


async def test_what_a_lease_was_measured_by_is_forgotten_when_it_ends(run: StoredRun, alice: Identity) -> None:
    lease = await run.lease_one(alice)
    for length in (1, 2, 3):
        await run.leasing.renew(alice.key_id, progress(lease, tuple(range(length))))
    assert len((await run.row(t.leases)).earlier_commitments) == 2
    await run.leasing.give_back(alice.key_id, [lease.lease_id])
    assert (await run.row(t.leases)).earlier_commitments == []


async def test_standing_is_read_when_leases_are_granted(run: StoredRun, alice: Identity) -> None:
    from coordinator.store import workers

    async with run.db.write() as connection:
        await workers.add_entries(connection, [Entry(alice.key_id, EntryKind.BAN, 0, None, "enough")], 0.0)
    with pytest.raises(WorkerFault, match="enough"):
        await run.leasing.acquire(alice.key_id, 1)


def _leasing(run: StoredRun, make: Callable[[int], Task], max_prompt_tokens: int = 64) -> Leasing:
    """The run's leasing with another environment."""
    return Leasing(
        run.db,
        secret=SECRET,
        scheduling=run.scheduling,
        environments=[EnvironmentShare("sums", 1.0, 8, make)],
        tokenize=lambda text: list(text.encode()),
        max_prompt_tokens=max_prompt_tokens,
    )


async def test_a_task_that_raises_or_is_too_long_is_passed_over_with_an_event(run: StoredRun, alice: Identity) -> None:
    def make(index: int) -> Task:
        if index == 0:
            raise ZeroDivisionError("no such task")
        return Task("sums", index, "x" * (100 if index == 1 else 5))

    granted = await _leasing(run, make).acquire(alice.key_id, 1)
    ((lease, sample),) = granted.leases
    assert (lease.sample_id, sample.prompt_token_ids) == ("g2-0", (120,) * 5)
    async with run.db.read() as connection:
        rows = (await connection.execute(select(t.events).where(t.events.c.action == "bad_task"))).all()
    assert [row.subject for row in rows] == ["sums/0", "sums/1"]
    assert "ZeroDivisionError" in rows[0].detail
    assert "max_prompt_tokens" in rows[1].detail


async def test_a_task_that_no_database_holds_is_passed_over_with_an_event(run: StoredRun, alice: Identity) -> None:
    def make(index: int) -> Task:
        if index == 0:
            raise ValueError("quotes \0 and \ud800")
        return Task("sums", index, "a\0b" if index == 1 else "fine", {2: {1}, 3: math.nan}.get(index, "1"))

    ((lease, _),) = (await _leasing(run, make).acquire(alice.key_id, 1)).leases
    assert lease.sample_id == "g4-0"
    details = [row.detail for row in await run.rows(t.events, t.events.c.action == "bad_task")]
    assert [word in detail for word, detail in zip(("quotes", "store", "set", "float"), details, strict=True)] == [
        True
    ] * 4


async def test_an_environment_without_a_usable_task_is_our_fault_and_says_so(run: StoredRun, alice: Identity) -> None:
    with pytest.raises(OurFault, match="32 tasks in a row"):
        await _leasing(run, lambda index: Task("sums", index, ""), 64).acquire(alice.key_id, 1)


async def test_many_new_keys_from_one_address_do_not_take_all_that_newcomers_get(begin: Begin, alice: Identity) -> None:
    run = await begin(newcomer_share=1.0, newcomer_address_share=0.5, probation_rollouts=100)
    sybils = [make_identity(70 + i) for i in range(6)]
    await run.join(*sybils)
    async with run.db.write() as connection:
        elsewhere = update(t.workers).where(t.workers.c.worker_id == alice.key_id).values(address="10.0.0.9")
        await connection.execute(elsewhere)
    granted = [len((await run.leasing.acquire(key.key_id, 8)).leases) for key in sybils]
    assert sum(granted) == 4  # half of a capacity of 8
    assert (await run.leasing.acquire(sybils[0].key_id, 8)).reason == "newcomers"
    assert len((await run.leasing.acquire(alice.key_id, 8)).leases) == 4
