from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from coordinator import feeding
from coordinator.store import summary
from coordinator.store import tables as t
from protocol.errors import BadSignature, UserError
from protocol.manifest import InvalidManifest
from protocol.policy import PolicyVersion
from protocol.rollout import Outcome, Verdict
from protocol.rotation import sign_rotation
from protocol.signing import MANIFEST, Identity
from tests.factories import RUN_ID, TRAINER, make_identity, make_version, version_digest
from tests.stored_run import StoredRun, accepted, rejected

Begin = Callable[..., Awaitable[StoredRun]]


async def complete(run: StoredRun, worker: Identity, samples: int = 2, **form: Any) -> list[str]:
    """Groups of two, worked and accepted; the rollouts' ids."""
    identifiers = await run.work(worker, samples, **form)
    await run.judge()
    return identifiers


def names(groups: list[Any]) -> list[str]:
    return [group.group_id for group in groups]


async def test_a_complete_group_is_served_with_its_raw_rewards(run: StoredRun, alice: Identity) -> None:
    identifiers = await run.work(alice, 2)
    first, second = await run.claim()
    await run.record(first.rollout_id, accepted(first, reward=1.0))
    await run.record(second.rollout_id, accepted(second, reward=0.0))
    (group,) = await run.pull()
    assert (group.group_id, group.task_id, group.environment, group.n_requested) == ("g0", "sums/0", "sums", 2)
    assert bytes(group.prompt_token_ids).decode() == "0 + 1 ="
    assert [item.rollout_id for item in group.rollouts] == identifiers
    assert [item.reward for item in group.rollouts] == [1.0, 0.0]
    assert [item.old_logprobs for item in group.rollouts] == [(-0.5,) * 6] * 2
    assert {item.worker_id for item in group.rollouts} == {alice.key_id}


async def test_nothing_is_served_without_a_verdict(run: StoredRun, alice: Identity) -> None:
    await run.work(alice, 2)
    assert await run.pull() == []
    (first, _) = await run.claim()
    assert await run.pull() == []
    await run.record(first.rollout_id, accepted(first))
    assert await run.pull() == []
    assert await run.rows(t.consumptions) == []


async def test_what_was_rejected_or_is_inconclusive_is_never_served(run: StoredRun, alice: Identity) -> None:
    await run.work(alice, 2)
    first, second = await run.claim()
    await run.record(first.rollout_id, rejected())
    await run.record(second.rollout_id, Verdict(Outcome.INCONCLUSIVE))
    await run.let_group_expire()
    assert await run.pull() == []
    assert await run.rows(t.consumptions) == []


async def test_a_batch_has_at_most_the_groups_asked_for_oldest_first(run: StoredRun, alice: Identity) -> None:
    await complete(run, alice, 8)
    assert names(await run.pull(max_groups=2)) == ["g0", "g1"]
    assert await run.pull(max_groups=2, held=["g0", "g1"]) == []
    assert names(await run.pull(batch=1, max_groups=3)) == ["g2", "g3"]


async def test_a_batch_is_filled_as_groups_become_ready(run: StoredRun, alice: Identity) -> None:
    await complete(run, alice)
    assert names(await run.pull(max_groups=2)) == ["g0"]
    await complete(run, alice)
    assert names(await run.pull(max_groups=2, held=["g0"])) == ["g1"]


async def test_a_batch_is_served_again_identically_until_it_is_acknowledged(run: StoredRun, alice: Identity) -> None:
    await complete(run, alice, 4)
    first = await run.pull()
    again = StoredRun(run.db, run.scheduling)  # the coordinator was killed and started again
    assert await again.pull() == first
    assert await run.feeding.acknowledge(0) == 1
    assert await run.feeding.acknowledge(0) == 0
    with pytest.raises(UserError, match="batch 0 is acknowledged"):
        await run.pull()
    assert await run.pull(batch=1) == []


async def test_what_is_acknowledged_was_trained_on(run: StoredRun, alice: Identity) -> None:
    (identifier, _) = await complete(run, alice)
    await run.pull()
    assert (await run.rollout_state(identifier), await run.group_state("g0")) == ("served", "served")
    await run.feeding.acknowledge(0)
    assert (await run.rollout_state(identifier), await run.group_state("g0")) == ("trained", "done")


async def test_one_acknowledgement_covers_all_earlier_batches(run: StoredRun, alice: Identity) -> None:
    await complete(run, alice, 6)
    for batch in range(3):
        await run.pull(batch=batch, max_groups=1)
    assert await run.feeding.acknowledge(1) == 2
    assert (await run.feeding.state())[1] == 2
    assert names(await run.pull(batch=2, max_groups=1)) == ["g2"]


async def test_a_rollout_is_consumed_at_most_once_also_when_pulls_race(run: StoredRun, alice: Identity) -> None:
    await complete(run, alice, 8)
    served = await asyncio.gather(*(run.pull(batch=batch, max_groups=3) for batch in range(4)))
    groups = [name for batch in served for name in names(batch)]
    assert sorted(groups) == ["g0", "g1", "g2", "g3"]
    consumed = [row.rollout_id for row in await run.rows(t.consumptions)]
    assert len(consumed) == len(set(consumed)) == 8


async def test_two_pulls_of_one_batch_get_the_same(run: StoredRun, alice: Identity) -> None:
    await complete(run, alice, 4)
    first, second = await asyncio.gather(run.pull(), run.pull())
    assert first == second
    assert len(await run.rows(t.consumptions)) == 4


async def test_staleness_at_consumption_goes_by_the_oldest_span(begin: Begin, alice: Identity) -> None:
    run = await begin(versions=3, max_staleness=1, min_group=1)
    old, fresh = await run.lease(alice, 2)
    await run.change(t.leases, min_version=1)
    stale = await run.submit(alice, old, versions=(1, 2))
    await run.submit(alice, fresh, versions=(2,))
    await run.judge()
    (group,) = await run.pull(version=3)
    assert [item.rollout.oldest_version for item in group.rollouts] == [2]
    assert await run.rollout_state(stale) == "dropped"
    assert await run.drops() == {"stale": (1, 6)}
    assert [row.staleness for row in await run.rows(t.consumptions)] == [1]


async def test_a_group_that_grew_stale_is_reopened_with_the_same_seeds(begin: Begin, alice: Identity) -> None:
    run = await begin(versions=1, max_staleness=1)
    await complete(run, alice)
    seeds = {row.sample_id: row.seed for row in await run.rows(t.samples)}
    for version in (1, 2):
        await run.announce(version)
    assert await run.pull(version=2) == []
    assert await run.drops() == {"stale": (2, 12)}
    assert await run.group_state("g0") == "open"
    leases = await run.lease(alice, 2)
    assert [(lease.sample_id, lease.min_version) for lease in leases] == [("g0-0", 1), ("g0-1", 1)]
    assert {row.sample_id: row.seed for row in await run.rows(t.samples)} == seeds
    assert await run.rows(t.consumptions) == []


async def test_an_incomplete_group_past_its_deadline_goes_with_enough(
    begin: Begin, alice: Identity, bob: Identity
) -> None:
    run = await begin(group_size=3, min_group=2)
    await complete(run, alice, 2)
    straggler = await run.lease_one(bob)
    assert await run.pull() == [], "not before its deadline"
    await run.let_group_expire()
    (group,) = await run.pull()
    assert (len(group.rollouts), group.n_requested) == (2, 3)
    assert (await run.row(t.leases, t.leases.c.lease_id == straggler.lease_id)).state == "revoked"
    assert await run.sample_state(straggler.sample_id) == "dropped"


async def test_what_is_rejected_after_its_group_went_is_leased_to_nobody(
    begin: Begin, alice: Identity, bob: Identity
) -> None:
    """Such samples would wait for ever, before all others, and every grant look at them."""
    run = await begin(group_size=3, min_group=2)
    await complete(run, alice, 2)
    (late,) = await run.work(bob, 1)
    await run.let_group_expire()
    assert len(await run.pull()) == 1
    await run.judge(rejected())
    assert await run.rollout_state(late) == "rejected"
    assert await run.sample_state("g0-2") == "dropped"
    assert not await run.rows(t.samples, t.samples.c.state == "waiting", t.samples.c.group_id == "g0")


async def test_an_incomplete_group_past_its_deadline_is_dropped_with_too_few(
    begin: Begin, alice: Identity, bob: Identity
) -> None:
    run = await begin(group_size=3, min_group=2)
    (orphan,) = await complete(run, alice, 1)
    straggler = await run.lease_one(bob)
    await run.let_group_expire()
    assert await run.pull() == []
    assert await run.drops() == {"incomplete_group": (1, 6)}
    assert (await run.rollout_state(orphan), await run.group_state("g0")) == ("dropped", "dropped")
    assert (await run.row(t.leases, t.leases.c.lease_id == straggler.lease_id)).state == "revoked"
    assert [lease.sample_id for lease in await run.lease(bob, 1)] == ["g1-0"], "nothing more is made for it"


async def test_what_is_purged_before_it_is_served_is_not_served(run: StoredRun, alice: Identity, bob: Identity) -> None:
    from coordinator import verdicts

    await run.work(alice, 1)
    await run.work(bob, 1)
    await run.judge()
    async with run.db.write() as connection:
        await verdicts.purge(connection, alice.key_id, at=0.0, actor="operator", why="test")
    assert await run.pull() == []
    await run.let_group_expire()
    assert await run.pull() == []


async def test_what_was_served_survives_a_ban(run: StoredRun, alice: Identity) -> None:
    from coordinator import verdicts

    await complete(run, alice)
    first = await run.pull()
    async with run.db.write() as connection:
        await verdicts.purge(connection, alice.key_id, at=0.0, actor="operator", why="test")
    assert await run.pull() == first, "a batch never changes under the trainer's hands"


async def test_where_the_run_stands(begin: Begin, alice: Identity) -> None:
    run = await begin(versions=0)
    assert await run.feeding.state() == (None, 0)
    await run.announce(0)
    assert await run.feeding.state() == (PolicyVersion(0, version_digest(0)), 0)


async def test_a_manifest_is_the_trainers_and_of_this_run(run: StoredRun) -> None:
    with pytest.raises(BadSignature):
        await run.feeding.announce(make_version(1, signer=make_identity(66)))
    with pytest.raises(BadSignature):
        await run.feeding.announce(replace(make_version(1), signature=bytes(64)))
    with pytest.raises(UserError, match="of run 'other'"):
        await run.feeding.announce(make_version(1, run_id="other"))
    with pytest.raises(InvalidManifest):
        await run.feeding.announce(TRAINER.sign(MANIFEST, b"{}"))
    assert (await run.feeding.state())[0] == PolicyVersion(0, version_digest(0))


async def test_a_rotated_key_announces_with_the_statement_that_leads_to_it(run: StoredRun) -> None:
    new = make_identity(67)
    rotation = sign_rotation(RUN_ID, TRAINER, new.key_id, 0)
    with pytest.raises(BadSignature):
        await run.feeding.announce(make_version(1, signer=new))
    assert await run.feeding.announce(make_version(1, signer=new), [rotation]) == 1
    with pytest.raises(BadSignature, match="rotated away after version 0"):
        await run.feeding.announce(make_version(2))
    stranger = sign_rotation(RUN_ID, make_identity(66), make_identity(68).key_id, 0)
    with pytest.raises(BadSignature):
        await run.feeding.announce(make_version(2, signer=make_identity(68)), [stranger])


async def test_a_repeated_report_replaces_the_earlier_one(run: StoredRun, alice: Identity) -> None:
    identifiers = await complete(run, alice)
    await run.pull()
    for reward, trained in ((0.25, []), (0.5, identifiers[:1])):
        await run.feeding.report(
            batch=0,
            trainer_version=0,
            optimizer_steps=1,
            metrics={"reward_mean": reward},
            dropped={"zero_advantage": 1},
            trained=trained,
        )
    row = await run.row(t.steps)
    assert (row.metrics, row.dropped) == ({"reward_mean": 0.5}, {"zero_advantage": 1})
    trained_on = {row.rollout_id: row.trained for row in await run.rows(t.consumptions)}
    assert trained_on == {identifiers[0]: True, identifiers[1]: False}


async def test_a_report_names_as_many_rollouts_as_a_batch_may_hold(run: StoredRun, alice: Identity) -> None:
    identifiers = await complete(run, alice)
    await run.pull()
    await run.step(trained=[*identifiers, *(f"sha256:{number:064x}" for number in range(1 << 16))])
    assert all(row.trained for row in await run.rows(t.consumptions))


async def test_a_number_that_is_not_finite_is_left_out_of_a_report(run: StoredRun) -> None:
    await run.feeding.report(
        batch=0,
        trainer_version=0,
        optimizer_steps=0,
        metrics={"grad_norm": float("nan"), "approx_kl": float("inf"), "reward_mean": 0.5},
        dropped={},
        trained=[],
    )
    assert (await run.row(t.steps)).metrics == {"reward_mean": 0.5}


async def test_alarms_of_the_trainer_are_audit_events_at_both_ends(run: StoredRun) -> None:
    for batch, alarms in enumerate(({"kl": "far"}, {"kl": "further", "skipped": "not finite"}, {}, {})):
        for _ in range(2):  # each is reported twice, as after a crash
            await run.feeding.report(
                batch=batch, trainer_version=batch, optimizer_steps=1, metrics={}, dropped={}, trained=[], alarms=alarms
            )
    found = [(row.action, row.subject, row.detail) for row in await run.rows(t.events) if row.actor == "trainer"]
    assert [each for each in found if each[0] != "version"] == [
        ("trainer_alarm", "kl", "far (batch 0, version 0)"),
        ("trainer_alarm", "skipped", "not finite (batch 1, version 1)"),
        ("trainer_alarm_over", "kl", "batch 2, version 2"),
        ("trainer_alarm_over", "skipped", "batch 2, version 2"),
    ]
    async with run.db.read() as connection:
        seen = await summary.read(connection)
    assert {event["subject"] for event in seen.alerts} == {"kl", "skipped"}


async def test_a_batch_too_large_for_a_message_comes_in_parts(
    run: StoredRun, alice: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeding, "_ANSWER_TOKENS", 1)
    await run.work(alice, 4)
    await run.judge()
    (first,) = await run.pull()
    (second,) = await run.pull(held=[first.group_id])
    assert (first.group_id, second.group_id) == ("g0", "g1")
    assert await run.pull(held=["g0", "g1"]) == []
